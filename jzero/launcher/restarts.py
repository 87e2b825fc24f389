"""Run a job again after a failure, unless another start would fail in the same way."""

from __future__ import annotations

import asyncio
import re
import secrets
import signal
import sys
import time
from dataclasses import replace
from typing import NamedTuple

from jzero.distributed import outages
from jzero.distributed.exit_codes import CONFIG, SAVED, UNAVAILABLE
from jzero.errors import ConfigError
from jzero.launcher.guard import Signals
from jzero.launcher.job import Job
from jzero.launcher.runner import Attempt

PAUSE = 15.0  # seconds until hosts with a fault are asked again
EARLY = 60.0  # seconds: without a count of steps, only failures soon after the start are compared
_PASSING = {SAVED, UNAVAILABLE, *(128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))}


class Failure(NamedTuple):
    """What two attempts have in common if they fail in the same way."""

    code: int
    last_line: str  # of the rank that failed first; it has the step if an exception ended the rank (last_words.py)
    steps: int  # finished since the attempt began, as last reported; -1: none counted


def failure_of(attempt: Attempt) -> Failure | None:
    """Return how a rank of the attempt failed; None for a cause that may pass, and if nobody knows at which step."""
    if not attempt.failure or attempt.culprit is None or attempt.failure[0] in _PASSING:
        return None
    line = next((line for line in reversed(attempt.lines[attempt.culprit]) if line.strip()), "")
    # A line with the global step says more than a count that is up to a second old.
    named = "jzero: after step " in line
    steps = 0 if named else max((s[0] for s in attempt.steps.values()), default=-1)
    if steps < 0 and attempt.age() > EARLY:
        return None
    return Failure(attempt.failure[0], re.sub(r"0x[0-9a-fA-F]+", "0x", line.strip()), steps)


def why_not(now: Failure | None, before: Failure | None) -> str:
    """Return why another start would not help, with the evidence; "" if it may."""
    if now and now.code == CONFIG:
        return f"exit code {CONFIG}: the config, the model or a call is wrong, and another start would not change it"
    if now and now == before:
        when = f"after {now.steps} steps" if now.steps > 0 else "at the same step"
        return f"it failed like the attempt before, {when}: exit code {now.code}; last line: {now.last_line or 'none'}"
    return ""


def outage_of(attempt: Attempt, name: str) -> outages.Outage:
    """Describe the failure of an attempt in one line, with the last line of output of a rank that ended itself."""
    code, what = attempt.failure or (1, "")
    lines = attempt.lines[attempt.culprit] if attempt.culprit is not None and code < 128 else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    reason = what.partition("; its last lines:")[0].split("\n")[0] + (f": {last}" if last else "")
    return outages.Outage(name, attempt.died, attempt.noticed, code, reason)


async def run(job: Job, signals: Signals) -> int:
    """Run the job, with up to `--max_restarts` restarts after failures, and return the exit code.

    An attempt that finds too few hosts without a fault counts as a restart; the next one waits PAUSE seconds for them.
    """
    restarts, code, command = job.options.max_restarts, 0, secrets.token_hex(8)
    before: Failure | None = None
    ended: list[outages.Outage] = []
    for number in range(restarts + 1):
        # A later attempt takes the checkpoint directory over from an earlier one (checkpoint/lock.py).
        name = f"{command} {number}"
        shared = job.shared | {"JZERO_ATTEMPT": name} | outages.pack(ended)
        attempt, pause = Attempt(replace(job, shared=shared)), 0.0
        signals.to(attempt.interrupt)
        try:
            code = await attempt.run()
            if not attempt.failure or attempt.signalled:
                return code
            now = failure_of(attempt)
            if number < restarts and (why := why_not(now, before)):
                text = f"jzero: no restart after attempt {number + 1} of {restarts + 1}: {why}"
                print(text, file=sys.stderr, flush=True)
                return code
            before = now
            ended.append(outage_of(attempt, name))
        except ConfigError as error:
            if not number:
                raise
            pause = PAUSE
            ended.append(outages.Outage(name, time.time(), time.time(), CONFIG, str(error)))
            print(f"jzero: {error}", file=sys.stderr, flush=True)
        if number < restarts:
            end = time.monotonic() + pause
            while time.monotonic() < end:
                await asyncio.sleep(0.2)
                if attempt.signalled:
                    return 128 + attempt.signalled
            print(f"jzero: restart {number + 1} of {restarts}", file=sys.stderr, flush=True)
    return code
