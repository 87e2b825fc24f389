"""The connection to the agent on one host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from jzero._compat import close_transport
from jzero.launcher.job import Job
from jzero.launcher.transports import agent_command

SENT = ("jzero.errors", "jzero.distributed.connections", "jzero.distributed.machine", "jzero.launcher.descendants")


@cache
def agent_source() -> str:
    """Return the agent's source, after the modules of jzero that it imports: its host may have none, or others."""
    lines = ["import sys, types"]
    for name in ("jzero", "jzero.distributed", "jzero.launcher", *SENT):
        lines.append(f"module = sys.modules[{name!r}] = types.ModuleType({name!r})")
        if name in SENT:
            source = Path(__file__).parents[2].joinpath(*name.split(".")).with_suffix(".py").read_text()
            lines.append(f"exec({source!r}, module.__dict__)")
    return "\n".join([*lines, Path(__file__).with_name("agent.py").read_text()])


class Link:
    """Messages to and from one agent, as lines of JSON over its standard input and output.

    Attributes:
      inbox: the messages, as (kind, value), that nobody has taken yet; ("end", exit code) is the last.
      heard: the time of the last message.
      ready: whether the agent runs and reads messages.
      lost: whether the agent ended or fell silent by itself.
    """

    def __init__(self, host: str, process: asyncio.subprocess.Process):
        self.host, self.process = host, process
        self.heard, self.errors = time.monotonic(), deque[str](maxlen=5)
        self.inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.ready, self.open, self.lost = False, True, False
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]

    @classmethod
    async def to(cls, job: Job, host: str, id: str = "") -> Link:
        """Start the agent of the job with this id on a host; its source goes through its standard input."""
        command = agent_command(job, host, id)
        pipe = asyncio.subprocess.PIPE
        # A session of its own: the terminal's Ctrl-C must reach only this command, which decides what the scripts get.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=2**26, start_new_session=True
        )
        link = cls(host, process)
        assert process.stdin is not None
        process.stdin.write(agent_source().encode() + b"\0")
        return link

    def tell(self, **message: object) -> None:
        """Send a message, if the agent can receive it."""
        if self.ready and self.open and self.process.stdin:  # until then the input is the agent's source
            with contextlib.suppress(OSError, RuntimeError):
                self.process.stdin.write((json.dumps(message) + "\n").encode())

    async def answer(self, kind: str, seconds: float) -> Any:
        """Drop messages until one is of this kind; return its value, or {"error": why there is none}."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    received, value = await self.inbox.get()
                    if received in (kind, "end"):
                        return value if received == kind else {"error": self.why(value)}
        except TimeoutError:
            return {"error": f"no answer in {seconds:g} s"}

    async def ask(self, kind: str, seconds: float, **message: object) -> Any:
        """Send a message, and return the value of its answer as `answer` does."""
        self.tell(**message)
        return await self.answer(kind, seconds)

    def why(self, code: int) -> str:
        """Explain why the agent ended: its last lines on stderr, which are also ssh's."""
        text = " ".join(" ".join(self.errors).split())
        return f"{text or 'its agent ended'} (exit code {code})"

    def close(self) -> None:
        """Close the agent's input, so that it kills its processes and ends."""
        self.open = False
        if self.process.stdin:
            self.process.stdin.close()

    def give_up(self) -> None:
        """Close the link and kill the local process: an ssh whose host does not answer may never end by itself."""
        self.close()
        for task in self.tasks:
            task.cancel()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        close_transport(self.process)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                self.heard = time.monotonic()
                with contextlib.suppress(ValueError):
                    # Others than dicts are no messages: a shell's profile may print lines of its own.
                    if isinstance(message := json.loads(line), dict):
                        self.ready = self.ready or "hello" in message
                        for kind, value in message.items():
                            self.inbox.put_nowait((kind, value))
        except Exception as error:  # such as a line over the limit; the agent ends with its input
            self.errors.append(unexpected(error))
            self.close()
        await self.tasks[1]
        self.lost, self.open = self.lost or self.open, False
        await self.inbox.put(("end", await self.process.wait()))

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.errors.append(line.decode(errors="replace").strip())


async def close_all(links: Collection[Link]) -> None:
    """Close the links, and give those up whose agents do not answer; wait up to 3 s for the ends."""
    for link in links:
        link.close() if link.ready and not link.lost else link.give_up()
    if ends := [asyncio.create_task(link.process.wait()) for link in links]:
        await asyncio.wait(ends, timeout=3)


def unexpected(error: BaseException) -> str:
    """Describe an exception that nobody expected: its type, its text, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({os.path.basename(frame.filename)}, line {frame.lineno})" for frame in last)
    return f"the command itself failed: {type(error).__name__}: {error}{where}; please report it"
