"""One start of a job as a state machine: what happens to it, and what it does about it.

It starts nothing and waits for nothing: runner.py brings the events, and sends what it tells the agents.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from jzero.distributed.last_words import HUNG, SAVED
from jzero.launcher.failure import Failure, Progress, ended, first_failure, listed, signal_name
from jzero.launcher.job import Job, Process
from jzero.launcher.output import is_noise

NOTICE = 20.0  # seconds after a rank has succeeded until the command prints which ranks still run
NOTICE_AFTER_SIGNAL = 5.0
FAILURE_GRACE = 4.0  # seconds between SIGTERM and SIGKILL after a failure; after a signal --grace holds
STACKS = 1.5  # seconds for the processes to print their stacks
AFTER_CTRL_C = 8.0  # seconds that the others have once a rank has failed after Ctrl-C: they may wait for it for ever


class State(Enum):
    CONNECTING = "agents start, and the hosts are checked"
    RUNNING = "the processes run"
    FAILED = "the agents have sent SIGTERM, and SIGKILL follows"
    INTERRUPTED = "the processes have the command's signal, and --grace seconds"
    KILLED = "the agents' inputs are closed, and so they kill what is left"


class AttemptEvent(Enum):
    STARTED = "the agents have their processes"
    FAILURE = "a rank failed, a host was lost, no step finished, or the command itself broke; the first one counts"
    SIGNAL = "the command received SIGINT, SIGTERM or SIGHUP"
    LATE = "the time to end is over"


class Attempt:
    """One start of a job.

    Args:
      put: prints a line to stdout (1) or stderr (2).
      tell: sends a message to all agents.
      kill: closes the agents' inputs.
      clock: seconds, which only grow.

    Attributes:
      left: the processes that have not ended.
      lines: rank -> the last lines it has printed, without noise.
      failure: the first one; None: there is none.
      signalled: the number of the first signal that the command received; None: none.
    """

    def __init__(
        self,
        job: Job,
        put: Callable[[str, int], None],
        tell: Callable[..., None],
        kill: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.job, self.id, self.state = job, secrets.token_hex(8), State.CONNECTING
        self._put, self._tell, self._close_agents, self._clock = put, tell, kill, clock
        self._began, self.progress = clock(), Progress(clock)
        self.left, self.lines = dict[int, Process](), dict[int, deque[str]]()
        self.failure: Failure | None = None
        self._grace = FAILURE_GRACE
        self.signalled: int | None = None
        self._codes: dict[int, int] = {}  # rank -> exit code, of those that have ended
        self._first_died: int | None = None  # its `exit` comes later, after its last output
        self._hang: tuple[str, float, float] | None = None  # a hang, its begin, and when the stacks are printed
        self._notice: float | None = math.inf  # when the command prints which ranks still run; None: it has
        self._deadline = math.inf  # when the remaining processes are killed

    def _on(self, event: AttemptEvent) -> None:
        """Take the transition of the event; an event that the table does not name changes nothing."""
        if (self.state, event) in TRANSITIONS:
            self.state, action = TRANSITIONS[self.state, event]
            action(self)

    def say(self, text: str) -> None:
        self._put(f"jzero: {text}", 2)

    def age(self) -> float:
        return self._clock() - self._began

    # ------------------------------------------------------------------ what happens

    def started(self, job: Job) -> None:
        """Watch the processes of the job, which may have fewer hosts than planned."""
        self.job = job
        self.left = {process.rank: process for host in job.hosts_here for process in job.of(host)}
        self.lines = {rank: deque(maxlen=20) for rank in self.left}
        self._on(AttemptEvent.STARTED)

    def receive(self, kind: str, value: Any) -> None:
        match kind, value:
            case "out", (rank, number, line):
                if not is_noise(line):
                    self.lines[rank].append(line)
                self._put(f"[{rank}] {line}" if len(self.job.processes) > 1 else line, number)
            case "status", steps:
                self.progress.note(steps)
            case "died", (rank, code) if code and self._first_died is None:
                self._first_died = rank
            case "exit", (rank, code):
                self._exited(rank, code)

    def lose(self, host: str, why: str) -> None:
        """Handle the end of a host's agent, and with it of its processes; `why` is "" if the command ended it."""
        if mine := {rank for rank, process in self.left.items() if process.host == host}:
            if why:
                self.fail(1, f"lost {host}: {why}")
            self.left = {rank: process for rank, process in self.left.items() if rank not in mine}

    def interrupt(self, number: int) -> None:
        """Handle a signal to the command: the scripts get the first one, and the second one kills them."""
        self.signalled = self.signalled or number
        self._on(AttemptEvent.SIGNAL)

    def fail(
        self, code: int, what: str, *, grace: float = FAILURE_GRACE, silence: float = 0.0, rank: int | None = None
    ) -> None:
        """End the whole job; the first failure is the one that is reported.

        Args:
          grace: seconds between SIGTERM and SIGKILL.
          silence: seconds since the last sign of life.
          rank: the rank whose end is the failure.
        """
        if self.failure is None:
            now = time.time()
            self.failure, self._grace = Failure(128 - code if code < 0 else code, what, now - silence, now, rank), grace
            self._on(AttemptEvent.FAILURE)

    def tick(self) -> None:
        now, limit = self._clock(), self.job.options.hang_timeout
        if self._hang:
            what, since, end = self._hang
            if now >= end:
                self.fail(HUNG, what, silence=now - since)
        elif limit and self.state is State.RUNNING and (what := self.progress.hung(self.left, limit)):
            self._tell(dump=True)
            self._hang = what, now - self.progress.still(), now + STACKS
        if self.left and self._notice is not None and now > self._notice and not self.failure:
            self._notice = None
            codes = ", ".join(f"rank {rank} {ended(self._codes[rank])}" for rank in self._failed_by_themselves()[:8])
            others = codes or ("the other ranks succeeded" if len(self.left) < len(self.lines) else "")
            self.say(f"still running: rank {listed(self.left)}{f' ({others})' if others else ''}")
        if now > self._deadline:
            self._on(AttemptEvent.LATE)

    def _exited(self, rank: int, code: int) -> None:
        """Record the end of a rank; the first failure ends the job."""
        process, self._codes[rank] = self.left.pop(rank, None), code
        if self._notice is not None:
            self._notice = self._clock() + (NOTICE_AFTER_SIGNAL if self.signalled else NOTICE)
        if process is None or code == 0 or self.failure:
            return
        if self.signalled:
            if self._failed_by_themselves() == [rank]:
                self._first_after_signal(rank, code, self.signalled)
        elif self._first_died != rank and self._first_died in self.left:
            pass  # that rank failed first; its last lines are still to come
        elif code == SAVED:
            what = f"rank {rank} received SIGTERM and saved; the others follow"
            self.fail(code, what, grace=self.job.options.grace)
        else:
            host = process.host if len(self.job.hosts) > 1 else ""
            self.fail(code, first_failure(rank, host, code, self.age(), self.lines[rank]), rank=rank)

    def _failed_by_themselves(self) -> list[int]:
        """List the ranks that failed after a signal, and not by that signal."""
        number = self.signalled or 0
        return [r for r, code in sorted(self._codes.items()) if code not in (0, SAVED, -number, 128 + number)]

    def _first_after_signal(self, rank: int, code: int, number: int) -> None:
        """Report the first rank that fails after a signal; after Ctrl-C it shortens the time of the others."""
        others, now = "", self._clock()
        if number == signal.SIGINT and self.left:
            self._deadline = min(self._deadline, now + AFTER_CTRL_C)
            others = f"; the others have {self._deadline - now:.0f} s"
        self.say(f"rank {rank} was the first to fail after {signal_name(number)}: it {ended(code)}{others}")

    # ------------------------------------------------------------------ what it does

    def _stop(self) -> None:
        self._tell(stop=self._grace)
        self._deadline = self._clock() + self._grace + 2

    def _pass_on(self) -> None:
        """Send the first signal to the scripts, which then have --grace seconds."""
        number, grace, now = self.signalled or 0, self.job.options.grace, self._clock()
        self._tell(signal=number)
        self._notice, self._deadline = now + NOTICE_AFTER_SIGNAL, now + grace
        self.say(f"{signal_name(number)}: the scripts have {grace:g} s to end; send it again to kill them now")

    def _kill(self) -> None:
        """Close the agents' inputs; once more in a minute, if something is left then."""
        if self.signalled and self.left:
            self.say(f"killed: rank {listed(self.left)}")
        self._deadline = self._clock() + 60
        self._close_agents()

    # ------------------------------------------------------------------ how it ended

    def verdict(self) -> int:
        """Print the failure; return the exit code: 0, that of the failure, 128 + n for signal n, or 75 if all saved."""
        if self.failure:
            with contextlib.suppress(OSError):  # nobody reads
                print(f"jzero: {self.failure.what}", file=sys.stderr, flush=True)
        if self.signalled:
            saved = self._codes.keys() == self.lines.keys() and set(self._codes.values()) == {SAVED}
            return SAVED if saved else 128 + self.signalled
        return self.failure.code if self.failure else 0


TRANSITIONS: dict[tuple[State, AttemptEvent], tuple[State, Callable[[Attempt], None]]] = {
    (State.CONNECTING, AttemptEvent.STARTED): (State.RUNNING, lambda attempt: attempt.progress.begin()),
    (State.CONNECTING, AttemptEvent.FAILURE): (State.FAILED, Attempt._stop),
    (State.CONNECTING, AttemptEvent.SIGNAL): (State.INTERRUPTED, Attempt._pass_on),
    (State.RUNNING, AttemptEvent.FAILURE): (State.FAILED, Attempt._stop),
    (State.RUNNING, AttemptEvent.SIGNAL): (State.INTERRUPTED, Attempt._pass_on),
    (State.FAILED, AttemptEvent.SIGNAL): (State.INTERRUPTED, Attempt._pass_on),
    (State.FAILED, AttemptEvent.LATE): (State.KILLED, Attempt._kill),
    (State.INTERRUPTED, AttemptEvent.FAILURE): (State.INTERRUPTED, Attempt._stop),
    (State.INTERRUPTED, AttemptEvent.SIGNAL): (State.KILLED, Attempt._kill),
    (State.INTERRUPTED, AttemptEvent.LATE): (State.KILLED, Attempt._kill),
    (State.KILLED, AttemptEvent.LATE): (State.KILLED, Attempt._kill),
}
