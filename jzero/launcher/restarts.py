"""Run a job to its end: again after a failure, unless another start would fail in the same way, and deaf to no signal.

Python runs signal handlers in the main thread, between two bytecodes; asyncio runs its own in the event loop. A look-up
of a host name, or a clean-up that waits for ever, would make the command deaf. So a thread of its own reads the signals
from a pipe, into which C code writes them (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from jzero.distributed import last_words
from jzero.distributed.last_words import CONFIG, SAVED, UNAVAILABLE
from jzero.errors import ConfigError
from jzero.launcher.attempt import Attempt
from jzero.launcher.failure import Failure
from jzero.launcher.job import Job
from jzero.launcher.link import unexpected
from jzero.launcher.runner import Runner

AFTER_GRACE = 8.0  # seconds until the command ends, whatever it does; its agents then kill their processes
PAUSE = 15.0  # seconds until hosts with a fault are asked again
EARLY = 60.0  # seconds: without a count of steps, only failures soon after the start are compared
_PASSING = {SAVED, UNAVAILABLE, *(128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))}


class Signals:
    """Pass SIGINT, SIGTERM and SIGHUP to the event loop, and end this process once the grace is over.

    Args:
      grace: seconds from the first signal on; a second signal ends it.
    """

    def __init__(self, grace: float):
        self._grace, self._seen = grace, 0
        self._deliver: Callable[[int], object] | None = None

    def to(self, handler: Callable[[int], None]) -> None:
        """Call `handler(number)` in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        self._handler = handler
        # The handler of the moment, so that no signal goes to an attempt that has just ended.
        self._deliver = lambda number: loop.call_soon_threadsafe(lambda: self._handler(number))

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write)
        caught = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
        # nohup ignores SIGHUP; keep it so
        self._before = {number: signal.signal(number, lambda *_: None) for number in caught}
        threading.Thread(target=self._watch, daemon=True, name="jzero signals").start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)

    def _watch(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number in self._before:
                    self._received(number)
        os.close(self._read)

    def _received(self, number: int) -> None:
        self._seen += 1
        if self._deliver is None:  # nothing has been started yet
            os._exit(128 + number)
        last = threading.Timer(AFTER_GRACE + (self._grace if self._seen == 1 else 0), self._end, (number,))
        last.daemon = True
        last.start()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._deliver(number)

    def _end(self, number: int) -> None:
        _say("the command itself was stuck; it ends now")
        os._exit(128 + number)


class Symptom(NamedTuple):
    """The traits that two attempts share if they fail in the same way."""

    code: int
    last_line: str  # of the rank that failed first; it has the step if an exception ended the rank (last_words.py)
    steps: int  # finished since the attempt began, as last reported; -1: none counted


def symptom_of(attempt: Attempt, failure: Failure) -> Symptom | None:
    """Return how a rank of the attempt failed; None for a cause that may pass, and if nobody knows at which step."""
    if failure.rank is None or failure.code in _PASSING:
        return None
    line = _last_line(attempt, failure.rank)
    # A line with the global step says more than a count that is up to a second old.
    steps = 0 if "jzero: after step " in line else attempt.progress.most()
    if steps < 0 and attempt.age() > EARLY:
        return None
    return Symptom(failure.code, re.sub(r"0x[0-9a-fA-F]+", "0x", line), steps)


def why_not(now: Symptom | None, before: Symptom | None) -> str:
    """Return why another start would not help, with the evidence; "" if it may."""
    if now and now.code == CONFIG:
        return f"exit code {CONFIG}: the config, the model or a call is wrong, and another start would not change it"
    if now and now == before:
        when = f"after {now.steps} steps" if now.steps > 0 else "at the same step"
        return f"it failed like the attempt before, {when}: exit code {now.code}; last line: {now.last_line or 'none'}"
    return ""


def outage_of(attempt: Attempt, failure: Failure, name: str) -> last_words.Outage:
    """Describe the failure of an attempt in one line, with the last line of output of a rank that ended itself."""
    code, what, died, noticed, rank = failure
    last = _last_line(attempt, rank) if rank is not None and code < 128 else ""
    reason = what.partition("; its last lines:")[0].split("\n")[0] + (f": {last}" if last else "")
    return last_words.Outage(name, died, noticed, code, reason)


def _last_line(attempt: Attempt, rank: int) -> str:
    """Return the last line of a rank that is not blank."""
    return next((line.strip() for line in reversed(attempt.lines[rank]) if line.strip()), "")


async def run_attempts(job: Job, signals: Signals) -> int:
    """Run the job, with up to `--max_restarts` restarts after failures, and return the exit code.

    An attempt that finds too few hosts without a fault counts as a restart; the next one waits PAUSE seconds for them.
    """
    restarts, code, command = job.options.max_restarts, 0, secrets.token_hex(8)
    before: Symptom | None = None
    ended: list[last_words.Outage] = []
    for number in range(restarts + 1):
        if number:
            _say(f"restart {number} of {restarts}")
        # A later attempt takes the checkpoint directory over from an earlier one (checkpoint/lock.py).
        name = f"{command} {number}"
        shared = job.shared | {"JZERO_ATTEMPT": name} | last_words.pack_outages(ended)
        runner = Runner(replace(job, shared=shared))
        attempt = runner.attempt
        signals.to(attempt.interrupt)
        try:
            code = await runner.run()
        except ConfigError as error:
            if not number:
                raise
            _say(str(error))
            ended.append(last_words.Outage(name, time.time(), time.time(), CONFIG, str(error)))
            end = time.monotonic() + (PAUSE if number < restarts else 0)
            while time.monotonic() < end and not attempt.signalled:
                await asyncio.sleep(0.2)
            if attempt.signalled:
                return 128 + attempt.signalled
            continue
        if not attempt.failure or attempt.signalled:
            return code
        now = symptom_of(attempt, attempt.failure)
        if number < restarts and (why := why_not(now, before)):
            _say(f"no restart after attempt {number + 1} of {restarts + 1}: {why}")
            return code
        before = now
        ended.append(outage_of(attempt, attempt.failure, name))
    return code


def run(job: Job) -> int:
    """Run a job and return its exit code; 1 after an exception that nobody expected.

    Raises:
      ConfigError: the hosts have faults.
    """
    with Signals(job.options.grace) as signals:
        try:
            return asyncio.run(run_attempts(job, signals))
        except ConfigError:
            raise
        except Exception as error:
            _say(unexpected(error))
            return 1


def _say(text: str) -> None:
    print(f"jzero: {text}", file=sys.stderr, flush=True)
