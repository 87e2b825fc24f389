"""Run a job: start an agent on every host, check the hosts, start the processes, and end all when one fails.

The command and its agents send each other a message every second. So each side notices within SILENCE seconds that the
other side, or the network between them, has failed; the agent then kills its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from jzero.distributed.exit_codes import CONFIG, HUNG, SAVED, UNAVAILABLE
from jzero.launcher.connecting import Connecting
from jzero.launcher.guard import unexpected
from jzero.launcher.job import Job, Process
from jzero.launcher.link import Link
from jzero.launcher.noise import is_noise
from jzero.launcher.printer import Printer

SILENCE = 8.0  # seconds without a message from an agent after which its host counts as lost
NOTICE = 20.0  # seconds after a rank has succeeded until the command prints which ranks still run
FAILURE_GRACE = 4.0  # seconds between SIGTERM and SIGKILL after a failure; after a signal --grace holds
STACKS = 1.5  # seconds for the processes to print their stacks
AFTER_CTRL_C = 8.0  # seconds that the others have once a rank has failed after Ctrl-C: they may wait for it for ever


class Attempt:
    """One start of a job."""

    def __init__(self, job: Job):
        self.id, self.started = secrets.token_hex(8), time.monotonic()
        self.steps: dict[int, tuple[int, int, str]] = {}  # rank -> steps finished, steps begun, process state
        self.ended = self.started  # when a rank last succeeded
        self.notice_printed = False  # the command has printed which ranks still run
        self.saved = 0  # ranks that saved after SIGTERM
        self.moved = time.monotonic()  # when a step last finished anywhere
        self.printer = Printer(lambda: self.fail(128 + signal.SIGPIPE, "nobody reads the output any more"))
        self.connecting = Connecting(job, self.printer)
        self.links = self.connecting.links
        self.use(job)
        self.first: int | None = None  # the first rank that died
        self.failure: tuple[int, str] | None = None  # exit code, message
        self.died = self.noticed = 0.0  # the last sign of life before the failure, and the notice, in UTC seconds
        self.culprit: int | None = None  # the rank whose end was the failure
        self.signalled: int | None = None
        self.badly: dict[int, int] = {}  # rank -> exit code, of those that failed after a signal
        self.deadline: float | None = None  # when the remaining processes are killed

    def use(self, job: Job) -> None:
        """Set the plan; again when hosts are left out."""
        self.job = job
        self.left: dict[int, Process] = {p.rank: p for host in self.connecting.hosts for p in job.of(host)}
        self.prefixed = len(job.processes) > 1
        self.lines: dict[int, deque[str]] = {rank: deque(maxlen=20) for rank in self.left}

    async def run(self) -> int:
        """Return the exit code: 0, that of the first rank that failed, or 128 + n for signal n; 75 if all saved."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self.broke)
        signal.signal(
            signal.SIGTSTP, signal.SIG_IGN
        )  # a command stopped by Ctrl-Z sends no pings, and the agents would end the job
        connecting = asyncio.create_task(self.connecting.run())
        try:
            while not connecting.done() and not self.signalled and not self.failure:
                await asyncio.wait([connecting], timeout=0.2)
                self.ping()
            if self.signalled or self.failure:
                return self.verdict()
            connecting.result()
            self.use(self.connecting.job)
            self.start()
            listeners = [asyncio.create_task(self.listen(link)) for link in self.links.values()]
            while self.left and any(link.open for link in self.links.values()):
                done, _ = await asyncio.wait(listeners, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                for listener in done:
                    listener.result()  # raise its exception, if any
                self.check_clocks()
            await self.clean_up()
            for listener in listeners:
                listener.cancel()
        finally:
            connecting.cancel()
            await asyncio.wait([connecting], timeout=3)  # until then it may add a link
            for link in self.links.values():
                link.close() if link.ready else link.give_up()
            if ends := [asyncio.create_task(link.process.wait()) for link in self.links.values()]:
                await asyncio.wait(ends, timeout=3)
            self.printer.end()
        return self.verdict()

    # ------------------------------------------------------------------ before

    def start(self) -> None:
        """Send every agent its processes."""
        o = self.job.options
        for host, link in self.links.items():
            at = {"MASTER_ADDR": self.connecting.address, "MASTER_PORT": str(self.connecting.port)}
            at |= {"JZERO_BIND_ADDRESS": self.connecting.bind} if self.connecting.bind else {}
            at |= {"JZERO_GRACE": f"{o.grace:g}", "JZERO_HANG_TIMEOUT": f"{o.hang_timeout:g}"}
            at |= {} if o.no_ssh else {"JZERO_MEETING": self.id}  # the rendezvous turns other jobs' processes away
            processes = [{"rank": p.rank, "env": p.env | at, "flag": self.job.flag(p)} for p in self.job.of(host)]
            link.tell(
                start={
                    "job": self.id, "cwd": self.job.cwd, "flag_at": self.job.flag_at, "processes": processes,
                    "logs": o.enable_each_rank_log, "time": time.strftime("%Y%m%d%H%M%S"),
                }
            )  # fmt: skip
            link.heard = time.monotonic()
        self.moved = time.monotonic()

    # ------------------------------------------------------------------ while it runs

    async def listen(self, link: Link) -> None:
        """Handle an agent's messages until it ends."""
        while True:
            kind, value = await link.inbox.get()
            if kind == "out":
                self.show(*value)
            elif kind == "status":
                self.note({int(rank): tuple(status) for rank, status in value.items()})
            elif kind == "died" and value[1] and self.first is None:
                self.first = value[0]
            elif kind == "exit":
                self.exited(*value)
            elif kind == "end":
                if mine := [rank for rank, p in self.left.items() if p.host == link.host]:
                    if link.lost or not self.signalled:  # else the grace is over, and this command closed the link
                        self.fail(1, f"lost {link.host}: {link.why(value)}")
                    self.left = {rank: p for rank, p in self.left.items() if rank not in mine}
                return

    def show(self, rank: int, number: int, line: str) -> None:
        if not is_noise(line):
            self.lines[rank].append(line)
        self.printer.put(f"[{rank}] {line}" if self.prefixed else line, number)

    def note(self, status: Mapping[int, tuple[int, int, str]]) -> None:
        """Record the ranks' steps."""
        for rank, new in status.items():
            if new[0] > self.steps.get(rank, (-1, -1, ""))[0]:
                self.moved = time.monotonic()
            self.steps[rank] = new

    def exited(self, rank: int, code: int) -> None:
        """Record the end of a rank; the first failure ends the job."""
        process, self.ended = self.left.pop(rank, None), time.monotonic()
        self.saved += code == SAVED
        if process is None or code == 0 or self.failure:
            return
        if self.signalled:
            self.exited_after_signal(rank, code, self.signalled)
            return
        if self.first != rank and self.first in self.left:  # that rank failed first; its last lines are still to come
            return
        if code == SAVED:
            self.fail(code, f"rank {rank} received SIGTERM and saved; the others follow", self.job.options.grace)
            return
        self.culprit = rank
        last = _mistake(self.lines[rank]) if code in (CONFIG, UNAVAILABLE) else ""
        last = last or "; its last lines:" + ("".join(f"\n    {line}" for line in self.lines[rank]) or " none")
        if any("unrecognized arguments: --local_rank" in line for line in self.lines[rank]):
            last += "\n  the script has no option --local_rank: add it, or pass --no_local_rank before the script"
        where = f" on {process.host}" if len(self.job.hosts) > 1 else ""
        self.fail(code, f"rank {rank}{where} {_how(code)} first, after {self.age():.0f} s{last}")

    def exited_after_signal(self, rank: int, code: int, number: int) -> None:
        """Report the first rank that fails after a signal; after Ctrl-C it shortens the time of the others."""
        if code in (SAVED, -number, 128 + number):  # the signal's own codes
            return
        if not self.badly:
            others, now = "", time.monotonic()
            if number == signal.SIGINT and self.left and self.deadline:
                self.deadline = min(self.deadline, now + AFTER_CTRL_C)
                others = f"; the others have {self.deadline - now:.0f} s"
            self.printer.put(f"jzero: after {_name(number)} rank {rank} {_how(code)} first{others}", 2)
        self.badly[rank] = code

    def fail(self, code: int, what: str, grace: float = FAILURE_GRACE, silence: float = 0.0) -> None:
        """End the whole job; the first failure is the one that is reported.

        Args:
          grace: seconds until the processes are killed.
          silence: seconds since the last sign of life.
        """
        if self.failure is None:
            self.failure = (128 - code if code < 0 else code), what
            self.noticed = time.time()
            self.died = self.noticed - silence
            self.stop(grace)

    def stop(self, grace: float) -> None:
        """Make all agents send SIGTERM, and after `grace` seconds SIGKILL."""
        for link in self.links.values():
            link.tell(stop=grace)
        self.deadline = time.monotonic() + grace + 2

    def interrupt(self, number: int) -> None:
        """Pass the first signal to the scripts, which then have --grace seconds; the second one kills them."""
        if self.signalled is not None:
            self.deadline = time.monotonic()
            return
        self.signalled, grace = number, self.job.options.grace
        for link in self.links.values():
            link.tell(signal=number)
        self.ended, self.notice_printed, self.deadline = time.monotonic(), False, time.monotonic() + grace
        self.printer.put(
            f"jzero: {_name(number)}: the scripts have {grace:g} s to end; send it again to kill them now", 2
        )

    def broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the job after an exception in a callback, such as a signal's; asyncio would print it and go on."""
        if "handle" in context and isinstance(context.get("exception"), Exception):
            self.fail(1, unexpected(context["exception"]))
        else:
            loop.default_exception_handler(context)

    def ping(self) -> None:
        for link in self.links.values():
            link.tell(ping=True)

    def check_clocks(self) -> None:
        """Send pings; act on silence, hangs and deadlines."""
        now = time.monotonic()
        self.ping()
        for link in self.links.values():
            if link.open and now - link.heard > SILENCE:
                self.fail(1, f"lost {link.host}: no message for {SILENCE:g} s", grace=1, silence=now - link.heard)
                link.give_up()  # `lost` stays False: no other agent could reach the host to clean up
        limit = self.job.options.hang_timeout
        counting = {rank: s for rank, s in self.steps.items() if s[0] >= 0 and rank in self.left}
        if limit and counting and now - self.moved > limit and not self.failure and not self.signalled:
            self.hang(counting, limit)
        some = len(self.left) < len(self.lines)
        if self.left and (some or self.signalled) and now - self.ended > (5 if self.signalled else NOTICE):
            well = "" if not some else " (the others have ended well)"
            codes = ", ".join(f"rank {rank} {_how(code)}" for rank, code in sorted(self.badly.items())[:8])
            self.print_once(f"still running: rank {_list(self.left)}" + (f" ({codes})" if codes else well))
        if self.deadline and now > self.deadline:
            if self.signalled:
                self.printer.put(f"jzero: killed: rank {_list(self.left)}", 2)
            self.deadline = now + 60
            for link in self.links.values():
                link.close()

    def print_once(self, text: str) -> None:
        if not self.notice_printed and not self.failure:
            self.notice_printed = True
            self.printer.put(f"jzero: {text}", 2)

    def hang(self, counting: Mapping[int, tuple[int, int, str]], limit: float) -> None:
        """Print all stacks, and fail with the ranks that are stopped or have begun the fewest steps."""
        stopped = [rank for rank, (*_, state) in counting.items() if state in "Tt"]
        fewest = min(begun for _, begun, _ in counting.values())
        behind = stopped or [rank for rank, (_, begun, _) in counting.items() if begun == fewest]
        each = ", ".join(
            f"rank {rank} {finished} of {begun}{' (stopped)' * (state in 'Tt')}"
            for rank, (finished, begun, state) in sorted(counting.items())
        )
        for link in self.links.values():
            link.tell(dump=True)
        what = (
            f"no step has finished for {limit:g} s; steps finished of those begun: {each}; look at rank "
            f"{_list(behind)} first (stacks above)"
        )
        silence = time.monotonic() - self.moved + STACKS
        asyncio.get_running_loop().call_later(STACKS, self.fail, HUNG, what, FAILURE_GRACE, silence)
        self.moved = time.monotonic() + 3600  # report it once

    def age(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started

    # ------------------------------------------------------------------ after

    async def clean_up(self) -> None:
        """Wait for the agents to end; where one died, start another that kills the processes it left."""
        lost = [link.host for link in self.links.values() if link.lost]
        for link in self.links.values():
            link.close()
        waits = [link.process.wait() for link in self.links.values()]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), 3)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*map(self.sweep, lost)), 6)

    async def sweep(self, host: str) -> None:
        """Kill the processes that a lost agent may have left, if its host can be reached."""
        with contextlib.suppress(OSError):
            link = await Link.to(self.job, host)
            try:
                await link.answer("hello", 5)
                link.tell(sweep=self.id)
                await link.answer("swept", 5)
            finally:
                link.give_up()

    def verdict(self) -> int:
        """Print the failure, if any, and return the exit code."""
        if self.failure:
            with contextlib.suppress(OSError):
                print(f"jzero: {self.failure[1]}", file=sys.stderr, flush=True)
        if self.signalled:
            return SAVED if self.saved == len(self.lines) else 128 + self.signalled
        return self.failure[0] if self.failure else 0


def _mistake(lines: Iterable[str]) -> str:
    """Return the ConfigError that ended a process, as last_words.py printed it; "" if there is none."""
    found = ""
    for line in lines:
        if line.startswith("jzero: "):
            found = line.replace("jzero", "", 1)
        elif found and line.startswith("- "):
            found += f"\n{line}"
    return found


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _how(code: int) -> str:
    return f"was killed by {_name(-code)}" if code < 0 else f"exited with code {code}"


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
