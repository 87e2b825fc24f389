"""The connection to the agent on one host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

from jzero._compat import close_transport
from jzero.launcher.job import Job
from jzero.launcher.transports import agent_command


class Link:
    """What is said to an agent and what it says; `lost`: it ended by itself."""

    def __init__(self, host: str, process: asyncio.subprocess.Process):
        self.host, self.process = host, process
        self.heard, self.errors = time.monotonic(), deque[str](maxlen=5)
        self.said: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.ready, self.open, self.lost = False, True, False
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]

    @classmethod
    async def to(cls, job: Job, host: str) -> Link:
        command = agent_command(job, host)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=2**26, start_new_session=True
        )
        link = cls(host, process)
        assert process.stdin is not None
        process.stdin.write(Path(__file__).with_name("agent.py").read_bytes() + b"\0")
        return link

    def tell(self, **message: Any) -> None:
        if self.ready and self.open and self.process.stdin:  # before it is ready the agent itself is being read
            with contextlib.suppress(OSError, RuntimeError):
                self.process.stdin.write((json.dumps(message) + "\n").encode())

    async def answer(self, kind: str, timeout: float) -> Any:
        """What the agent says of this kind, or {"error": why nothing}."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                said, value = await asyncio.wait_for(self.said.get(), left)
            except TimeoutError:
                break
            if said == kind:
                return value
            if said == "end":
                return {"error": self.why(value)}
        return {"error": f"no answer in {timeout:g} s"}

    def why(self, code: int) -> str:
        text = " ".join(" ".join(self.errors).split())
        return f"{text or 'its agent ended'} (exit code {code})"

    def close(self) -> None:
        """The agent sees the end of its input and kills what it has."""
        self.open = False
        if self.process.stdin:
            self.process.stdin.close()

    def give_up(self) -> None:
        """Close it, and end what would not end by itself: an ssh whose host does not answer, and what that started."""
        self.close()
        for task in self.tasks:
            task.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        close_transport(self.process)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.heard = time.monotonic()
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if not isinstance(message, dict):  # as the line before: a greeting of that host's shell
                continue
            self.ready = self.ready or "hello" in message
            for kind, value in message.items():
                await self.said.put((kind, message if kind == "bound" else value))
        await self.tasks[1]
        self.lost, self.open = self.open, False
        await self.said.put(("end", await self.process.wait()))

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.errors.append(line.decode(errors="replace").strip())
