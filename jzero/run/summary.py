"""The summary at the end of a run on process 0: how long it took, where the time went, where its files are."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from jzero.config import Config
from jzero.errors import escaped
from jzero.ledger.goodput import duration
from jzero.ledger.recorder import Recorder
from jzero.loss import LOSS
from jzero.profiling.device_times import DeviceTimes
from jzero.run.clock import CHECKPOINT, COMPILE, DATA, DEVICE, EVALUATION, HOST, PEERS, PROFILE, SCRIPT, START, Clock
from jzero.run.diagnosis.verdict import name_bottleneck
from jzero.run.panel import Panel
from jzero.run.speed import CompletedSteps, Speed, Totals

# The parts of the clock in the words of a summary. The devices' time is that of steps only, so the host's part of a
# step is the time in which they wait for it.
IN_WORDS = {
    START: "start", COMPILE: "compile", DATA: "data", PEERS: "other processes", HOST: "steps", DEVICE: "steps",
    PROFILE: "steps", EVALUATION: "evaluation", CHECKPOINT: "saves", SCRIPT: "script",
}  # fmt: skip


class Summary(NamedTuple):
    """The figures of a whole run.

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

    @classmethod
    def of(
        cls, clock: Clock, completed: CompletedSteps, files: Mapping[str, str], ledger: Recorder, config: Config,
        devices: int, profiled: DeviceTimes | None,
    ) -> Summary:  # fmt: skip
        """Sum up a run on so many devices; `profiled` is the time of a step's parts on one, if that is known."""
        seconds = clock.total
        return cls(
            seconds, completed.totals, completed.training_speed(seconds), completed.metrics, files, clock.cached,
            ledger.goodput(), name_bottleneck(seconds, config, devices, profiled),
        )  # fmt: skip

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
        return escaped("\n".join(lines))


class Ending(Protocol):
    """The observers of a run, as far as its end needs them."""

    @property
    def panel(self) -> Panel | None: ...

    def summary(self) -> Summary | None: ...


last: Ending | None = None  # of all runs of this process, the one that has taken the last step
_process = 0  # which took it: a fork has the variables of its parent, but not its run


def print_at_end(run: Ending) -> None:
    """Have the program's end print the summary of this run, unless another one takes a step later."""
    global last, _process
    if last is None:
        atexit.register(print_last)
    last, _process = run, os.getpid()


def print_last() -> None:
    """Print the summary of the run that has taken the last step.

    After an exception the traceback comes last, so there is no summary; Ctrl-C is a normal end of a run.
    """
    global last
    run, last = last, None
    if run is None or _process != os.getpid():
        return
    if isinstance(getattr(sys, "last_value", None), Exception):  # set by Python for what nothing catches
        if run.panel:
            run.panel.stop(keep=True)
    elif summary := run.summary():
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe has gone, or stdout is closed
            print(summary, flush=True)
