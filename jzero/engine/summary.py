"""The summary at the end of a run on process 0: how long it took, where the time went, where its files are."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jzero.engine.clock import CHECKPOINT, COMPILE, DATA, DEVICE, EVALUATION, HOST, PEERS, PROFILE, SCRIPT, START, Clock
from jzero.engine.finished import Finished, Totals
from jzero.engine.follower import Follower
from jzero.engine.speed import Ideal, Speed, training
from jzero.ledger.goodput import duration
from jzero.loss import LOSS

# The parts of the clock in the words of a summary. The devices' time is that of steps only, so the host's part of a
# step is the time in which they wait for it.
IN_WORDS = {
    START: "start", COMPILE: "compile", DATA: "data", PEERS: "other processes", HOST: "steps", DEVICE: "steps",
    PROFILE: "steps", EVALUATION: "evaluation", CHECKPOINT: "saves", SCRIPT: "script",
}  # fmt: skip


class Summary(NamedTuple):
    """What a run has done.

    Attributes:
      seconds: {part of the clock: seconds}.
      totals: what the devices have finished.
      speed: without start, compile, evaluation and saves.
      metrics: of the last step.
      files: {what: where}.
      cached: the programs that were read from the compilation cache instead of compiled.
      goodput: the line of the ledger; "" without one.
      verdict: lines about what the run waited for, and what to try.
    """

    seconds: Mapping[str, float]
    totals: Totals
    speed: Speed | None
    metrics: Mapping[str, float]
    files: Mapping[str, str]
    cached: int = 0
    goodput: str = ""
    verdict: Sequence[str] = ()

    @property
    def parts(self) -> dict[str, float]:
        """{part of the summary: seconds}, the longest first."""
        found: dict[str, float] = {}
        for part, spent in self.seconds.items():
            found[IN_WORDS[part]] = found.get(IN_WORDS[part], 0.0) + spent
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        totals, parts = self.totals, self.parts
        spared = f" ({self.cached} program{'s' if self.cached > 1 else ''} from the cache)" if self.cached else ""
        after = {IN_WORDS[COMPILE]: spared}
        listed = " + ".join(f"{name} {duration(s)}{after.get(name, '')}" for name, s in parts.items() if s >= 0.05)
        count = f"{totals.steps:,} step{'s' if totals.steps > 1 else ''}"
        lines = [f"jzero: {count} in {duration(sum(parts.values()))}" + (f" = {listed}" if listed else "")]
        tokens = f", {totals.tokens:,} tokens" if totals.tokens else ""
        loss = f"; last loss {self.metrics[LOSS]:.4f}" if LOSS in self.metrics else ""
        rate = f"; {self.speed}" if self.speed else ""
        lines.append(f"  {totals.samples:,} samples{tokens}{rate}{loss}; {totals.skipped} skipped")
        if self.goodput:
            lines.append(f"  {self.goodput}")
        lines += [f"  {line}" for line in self.verdict]
        if self.files:
            lines.append("  " + "; ".join(f"{what} in {where}" for what, where in self.files.items()))
        return "\n".join(lines)


class Ending:
    """What is left of a run for its end; it refers to no state.

    Attributes:
      files: {what: where} of the run's files.
      part: of the clock, what follows the last step.
      best: a step at the peak of its device, if that is known.
      stop_panel: takes the panel off the screen, but for its last state.
      goodput: returns the line of the ledger; "" without one.
      verdict: returns the lines about what the run waited for, given {part of the clock: seconds}.
    """

    def __init__(
        self, clock: Clock, follower: Follower, finished: Finished, files: dict[str, str], has_summary: bool = True
    ):  # fmt: skip
        self.files, self.part, self._has_summary = files, SCRIPT, has_summary
        self.best: Ideal | None = None
        self.stop_panel: Callable[[], None] = lambda: None
        self.goodput: Callable[[], str] = str
        self.verdict: Callable[[Mapping[str, float]], Sequence[str]] = lambda seconds: ()
        self._clock, self._follower, self._finished = clock, follower, finished

    def end(self) -> Summary | None:
        """Wait for the last step, and return the summary; None if there was no step, or the config wants none."""
        self._clock.lap(self.part)
        self._follower.settle()
        self._clock.lap(DEVICE)
        self.stop_panel()
        totals, speed = self._finished.totals, training(self._finished, self._clock, self.best)
        if not (totals.steps and self._has_summary):
            return None
        seconds, metrics = self._clock.total, self._finished.metrics
        return Summary(
            seconds, totals, speed, metrics, self.files, self._clock.cached, self.goodput(), self.verdict(seconds)
        )  # fmt: skip


_last: Ending | None = None  # of all runs of this process, the one that has taken the last step
_process = 0  # which took it: a fork has the variables of its parent, but not its run


def print_at_end(run: Ending) -> None:
    """Have the program's end print the summary of this run, unless another one takes a step later."""
    global _last, _process
    if _last is None:
        atexit.register(print_last)
    _last, _process = run, os.getpid()


def print_last() -> None:
    """Print the summary of the run that has taken the last step.

    After an exception the traceback comes last, so there is no summary; Ctrl-C is a normal end of a run.
    """
    global _last
    run, _last = _last, None
    if run is None or _process != os.getpid():
        return
    if isinstance(getattr(sys, "last_value", None), Exception):  # set by Python for what nothing catches
        run.stop_panel()
    elif summary := run.end():
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe has gone, or stdout is closed
            print(summary, flush=True)
