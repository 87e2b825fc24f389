"""A job from its start to its end: agents on all hosts, what they say, and what follows from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jzero.errors import ConfigError
from jzero.launcher import preflight
from jzero.launcher.job import Job, Process
from jzero.launcher.transports import agent_command

SILENCE = 8.0  # seconds without a word from an agent
GRACE = 4.0  # seconds between SIGTERM and SIGKILL after a failure
HUNG = 124  # the exit code after --hang_timeout, timeout(1)'s


class Link:
    """The connection to one host's agent."""

    def __init__(self, host: str, process: asyncio.subprocess.Process):
        self.host, self.process = host, process
        self.heard, self.errors = time.monotonic(), deque[str](maxlen=5)
        self.said: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.open, self.lost = True, False  # lost: it ended by itself
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
        if self.open and self.process.stdin:
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

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.heard = time.monotonic()
            try:
                message = json.loads(line)
            except ValueError:  # a greeting of that host's shell
                continue
            for kind, value in message.items() if isinstance(message, dict) else ():
                await self.said.put((kind, message if kind == "bound" else value))
        await self.tasks[1]
        self.lost, self.open = self.open, False
        await self.said.put(("end", await self.process.wait()))

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.errors.append(line.decode(errors="replace").strip())


class Attempt:
    """One start of a job."""

    def __init__(self, job: Job):
        self.job, self.id, self.started = job, secrets.token_hex(8), time.monotonic()
        names = list(job.hosts)
        self.hosts = [names[job.options.node_rank]] if job.options.no_ssh else names
        self.links: dict[str, Link] = {}
        self.left: dict[int, Process] = {p.rank: p for host in self.hosts for p in job.of(host)}
        self.prefixed = len(job.processes) > 1
        self.lines: dict[int, deque[str]] = {rank: deque(maxlen=20) for rank in self.left}
        self.steps: dict[int, tuple[int, str]] = {}
        self.moved = time.monotonic()
        self.failure: tuple[int, str] | None = None  # exit code, what happened
        self.signalled: int | None = None
        self.deadline: float | None = None  # when what is left is killed

    async def run(self) -> int:
        """The exit code: 0, the first failing rank's, 128 + n for signal n."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.interrupt, number)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # stopped, it would fall silent
        try:
            await self.connect()
            self.start()
            listeners = [asyncio.create_task(self.listen(link)) for link in self.links.values()]
            while self.left and any(link.open for link in self.links.values()):
                done, _ = await asyncio.wait(listeners, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                for listener in done:
                    listener.result()  # raises what it raised
                self.look()
            await self.clean_up()
            for listener in listeners:
                listener.cancel()
        finally:
            for link in self.links.values():
                link.close()
        return self.verdict()

    # ------------------------------------------------------------------ before

    async def connect(self) -> None:
        """Agents on all hosts, which then find the coordinator's address.

        Raises:
          ConfigError: all that is wrong, as a table.
        """
        started = await asyncio.gather(*(Link.to(self.job, host) for host in self.hosts))
        self.links = dict(zip(self.hosts, started, strict=True))
        said = await asyncio.gather(*(link.answer("hello", 20) for link in started))
        hellos = dict(zip(self.hosts, said, strict=True))
        gpus = self.job.options.platform == "gpu"
        found = preflight.faults(hellos, {host: len(self.job.hosts[host]) * gpus for host in self.hosts})
        self.address, self.port = self.job.address, self.job.port
        if not found and (not self.job.options.no_ssh or self.job.options.node_rank == 0):
            found = await self.find_coordinator(hellos)
        if found:
            raise ConfigError("nothing was started:\n" + preflight.table(hellos, found))

    async def find_coordinator(self, hellos: Mapping[str, Any]) -> dict[str, list[str]]:
        """A free port on the first host, and the address by which all others reach it; or what is wrong."""
        o, (first, *others) = self.job.options, self.links.values()
        first.tell(listen=self.port if o.master_port or o.no_ssh else 0)
        bound = await first.answer("bound", 10)
        if bound.get("error") or bound["bound"] is None:
            why = bound.get("error") or f"port {self.port}: {bound['why']}"
            return {first.host: [f"{why}; another job may have it: pass another --master_port, or none"]}
        self.port = bound["bound"]
        if o.no_ssh or not others:
            return {}
        own = [a for a in hellos[first.host]["addresses"] if not a.startswith("127.")]
        candidates = [o.master_addr] if o.master_addr else list(dict.fromkeys([first.host, *own]))
        for link in others:
            link.tell(connect=[[address, self.port] for address in candidates])
        reached = await asyncio.gather(*(link.answer("reached", 10) for link in others))
        for index, address in enumerate(candidates):
            if all(isinstance(r, list) and index in r for r in reached):
                self.address = address
                return {}
        wrong = f"reaches {first.host} by none of {', '.join(candidates)} (port {self.port}): pass --master_addr"
        deaf = {link.host: [wrong] for link, r in zip(others, reached, strict=True) if not isinstance(r, list) or not r}
        return deaf or {first.host: [f"no address of {', '.join(candidates)} is reached by all: pass --master_addr"]}

    def start(self) -> None:
        o = self.job.options
        for host, link in self.links.items():
            at = {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}
            at |= {} if o.no_ssh else {"JZERO_MEETING": self.id}  # no other job's processes
            processes = [{"rank": p.rank, "env": p.env | at, "flag": self.job.flag(p)} for p in self.job.of(host)]
            link.tell(
                start={
                    "job": self.id, "cwd": self.job.cwd, "first": self.job.first, "processes": processes,
                    "logs": o.enable_each_rank_log, "time": time.strftime("%Y%m%d%H%M%S"),
                }
            )  # fmt: skip
            link.heard = time.monotonic()
        self.moved = time.monotonic()

    # ------------------------------------------------------------------ while it runs

    async def listen(self, link: Link) -> None:
        while True:
            kind, value = await link.said.get()
            if kind == "out":
                self.show(*value)
            elif kind == "status":
                self.note({int(rank): (steps, state) for rank, (steps, state) in value.items()})
            elif kind == "exit":
                self.exited(*value)
            elif kind == "end":
                if mine := [rank for rank, p in self.left.items() if p.host == link.host]:
                    self.fail(1, f"lost {link.host}: {link.why(value)}")
                    self.left = {rank: p for rank, p in self.left.items() if rank not in mine}
                return

    def show(self, rank: int, number: int, line: str) -> None:
        self.lines[rank].append(line)
        where = sys.stdout if number == 1 else sys.stderr
        try:
            print(f"[{rank}] {line}" if self.prefixed else line, file=where, flush=True)
        except BrokenPipeError:  # as of `jzero train.py | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), where.fileno())
            self.fail(128 + signal.SIGPIPE, "the output is read by nobody any more")

    def note(self, status: Mapping[int, tuple[int, str]]) -> None:
        for rank, (steps, state) in status.items():
            if steps > self.steps.get(rank, (-1, ""))[0]:
                self.moved = time.monotonic()
            self.steps[rank] = steps, state

    def exited(self, rank: int, code: int) -> None:
        process = self.left.pop(rank, None)
        if process is None or code == 0 or self.failure or self.signalled:
            return
        last = "".join(f"\n    {line}" for line in self.lines[rank]) or " none"
        how = f"was killed by {_name(-code)}" if code < 0 else f"exited with code {code}"
        where = f" on {process.host}" if len(self.job.hosts) > 1 else ""
        self.fail(code, f"rank {rank}{where} {how} first, after {self.age():.0f} s; its last lines:{last}")

    def fail(self, code: int, what: str, grace: float = GRACE) -> None:
        """Take the whole job down."""
        if self.failure is None:
            self.failure = (128 - code if code < 0 else code), what
            self.stop(grace)

    def stop(self, grace: float) -> None:
        for link in self.links.values():
            link.tell(stop=grace)
        self.deadline = time.monotonic() + grace + 2

    def interrupt(self, number: int) -> None:
        """The first signal goes to the scripts, which have --grace seconds; the second ends them."""
        if self.signalled is None:
            self.signalled, grace = number, self.job.options.grace
            print(f"jzero: {_name(number)}: the scripts have {grace:g} s; once more ends them now", file=sys.stderr)
            for link in self.links.values():
                link.tell(signal=number)
            self.deadline = time.monotonic() + grace
        else:
            self.deadline = time.monotonic()

    def look(self) -> None:
        """What time alone brings: pings, silence, hangs, deadlines."""
        now = time.monotonic()
        for link in self.links.values():
            link.tell(ping=True)
            if link.open and now - link.heard > SILENCE:
                self.fail(1, f"lost {link.host}: not a word in {SILENCE:g} s")
                link.process.kill()
        limit = self.job.options.hang_timeout
        counting = {rank: s for rank, s in self.steps.items() if s[0] >= 0 and rank in self.left}
        if limit and counting and now - self.moved > limit and not self.failure and not self.signalled:
            self.hang(counting, limit)
        if self.deadline and now > self.deadline:
            self.deadline = now + 60
            for link in self.links.values():
                link.close()

    def hang(self, counting: Mapping[int, tuple[int, str]], limit: float) -> None:
        stopped = [rank for rank, (_, state) in counting.items() if state in "Tt"]
        fewest = min(steps for steps, _ in counting.values())
        behind = stopped or [rank for rank, (steps, _) in counting.items() if steps == fewest]
        each = ", ".join(f"rank {rank} {n}{' (stopped)' * (s in 'Tt')}" for rank, (n, s) in sorted(counting.items()))
        for link in self.links.values():
            link.tell(dump=True)
        ranks = ", ".join(map(str, behind))
        what = f"no step has finished for {limit:g} s; finished: {each}; look at rank {ranks} first (stacks above)"
        asyncio.get_running_loop().call_later(1.5, self.fail, HUNG, what)
        self.moved = time.monotonic() + 3600  # once

    def age(self) -> float:
        return time.monotonic() - self.started

    # ------------------------------------------------------------------ after

    async def clean_up(self) -> None:
        """Let all agents end; where one died, another kills what it left."""
        lost = [link.host for link in self.links.values() if link.lost]
        for link in self.links.values():
            link.close()
        waits = [link.process.wait() for link in self.links.values()]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), 3)
        for host in lost:
            with contextlib.suppress(OSError):
                link = await Link.to(self.job, host)
                await link.answer("hello", 3)
                link.tell(sweep=self.id)
                await link.answer("swept", 3)
                link.close()

    def verdict(self) -> int:
        if self.failure and not self.signalled:
            print(f"jzero: {self.failure[1]}", file=sys.stderr, flush=True)
            return self.failure[0]
        return 128 + self.signalled if self.signalled else 0


async def run(job: Job) -> int:
    """Run the job, again after a failure if `--max_restarts` says so; the exit code."""
    restarts = job.options.max_restarts
    for number in range(restarts + 1):
        attempt = Attempt(job)
        code = await attempt.run()
        if not attempt.failure or attempt.signalled or number == restarts:
            return code
        print(f"jzero: restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
    raise AssertionError


@contextlib.contextmanager
def pid_file(wanted: bool) -> Any:
    """`/tmp/PID.jzero` with this command's pid, while it runs."""
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"{os.getpid()}.jzero")
    if wanted:
        path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        if wanted:
            path.unlink(missing_ok=True)


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
