"""The steps that the devices have completed, and how fast: samples, tokens, MFU, and the time still to run."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import jax

from jzero.events import Event, StepEnded
from jzero.profiling.flops import step_flops
from jzero.run.clock import DATA, DEVICE, HOST, PEERS, PROFILE, SCRIPT
from jzero.step.batch import Amount
from jzero.step.train_step import TrainStep

WINDOW = 50  # steps over which a speed is measured


class Totals(NamedTuple):
    """The work that the devices have finished: steps, samples, tokens (None: unknown), skipped steps; and when."""

    steps: int = 0
    samples: int = 0
    tokens: int | None = 0
    skipped: int = 0
    time: float = 0.0


class CompletedSteps:
    """The steps that the devices have finished.

    Attributes:
      number, metrics: of the newest one; 0 and {} before the first.
      recent: the totals after each of the last steps; its last item is the newest.
      ideal: a step at the peak of its device, if that is known.
    """

    def __init__(self) -> None:
        self.number = 0
        self.metrics: Mapping[str, float] = {}
        self.recent = deque[Totals](maxlen=WINDOW + 1)
        self.ideal: Ideal | None = None

    @property
    def totals(self) -> Totals:
        return self.recent[-1] if self.recent else Totals()

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the last steps, at most `WINDOW`; None before two have finished."""
        speed = self.recent_speed()
        return speed and speed.step

    def on(self, event: Event) -> None:
        """Count a step that has ended."""
        if isinstance(event, StepEnded):
            self.add(event.step, Amount(event.given.rows, event.given.tokens), event.metrics, event.end)

    def add(self, number: int, amount: Amount, metrics: Mapping[str, float], time: float) -> None:
        """Take a step that the devices finished at a time by `time.perf_counter`, with what its batch held."""
        before = self.totals
        tokens = None if before.tokens is None or amount.tokens is None else before.tokens + amount.tokens
        skipped = before.skipped + int(metrics.get("skipped", 0.0))
        self.number, self.metrics = number, metrics
        self.recent.append(Totals(before.steps + 1, before.samples + amount.samples, tokens, skipped, time))

    def find_ideal(self, step: TrainStep) -> None:
        """Compute the ideal of a step that ran."""
        with contextlib.suppress(Exception):  # it serves the displays alone, and other processes would wait
            self.ideal = ideal(step)

    def recent_speed(self) -> Speed | None:
        """Return the speed of the last steps, with all that comes between them."""
        steps = list(self.recent)
        return between(steps[0], steps[-1], steps[-1].time - steps[0].time, self.ideal) if steps else None

    def training_speed(self, spent: Mapping[str, float]) -> Speed | None:
        """Return the speed of the whole run in the time of its steps, given {part of the clock: seconds}."""
        return between(Totals(), self.totals, sum(spent.get(part, 0.0) for part in TRAINING), self.ideal)

    def remaining(self, total: int | None) -> float | None:
        """Return the seconds to the step `total`, at the speed of the last ones; None if that is unknown."""
        speed = self.recent_speed()
        return None if total is None or speed is None else max(0, total - self.number) * speed.step


# The parts of the clock without start, compile, evaluation and saves.
TRAINING = (DATA, PEERS, HOST, DEVICE, PROFILE, SCRIPT)


class Ideal(NamedTuple):
    """A step at the peak of its device: the seconds that its useful products take there, for batches of one amount.

    Useful are those of the forward and backward pass, without recomputation (Chowdhery et al., arXiv:2204.02311, B).
    """

    seconds: float
    amount: Amount

    def utilization(self, totals: Totals, seconds: float) -> float | None:
        """Return the MFU of the steps in `totals`, which took so long; None if their batches differ."""
        alike = (totals.samples, totals.tokens) == self.amount.times(totals.steps)
        return self.seconds * totals.steps / seconds if alike and seconds else None


def ideal(step: TrainStep) -> Ideal | None:
    """Return the ideal of a step that ran; None on devices whose peak is unknown, such as CPUs, and in a pipeline."""
    device = jax.local_devices()[0]
    if device.platform == "cpu" or step.traced is None:
        return None
    found = step_flops(step, step.traced)
    peak = found.peak(device.device_kind)
    if peak is None or found.stages > 1:  # the devices of a pipeline run products in idle ticks too
        return None
    return Ideal((found.whole.forward + found.whole.backward) / (1e12 * peak), step.amount)


class Speed(NamedTuple):
    """A speed over some steps: per second, seconds of a step, MFU from 0 to 1.

    >>> print(Speed(512.4, 524_697.6, 0.0625, 0.412))
    512.4 samples/s, 524,698 tokens/s, MFU 41.2 %
    """

    samples: float
    tokens: float | None
    step: float
    mfu: float | None

    def __str__(self) -> str:
        tokens = f", {self.tokens:,.0f} tokens/s" if self.tokens else ""
        mfu = "" if self.mfu is None else f", MFU {100 * self.mfu:.1f} %"
        return f"{self.samples:,.1f} samples/s{tokens}{mfu}"


def between(first: Totals, last: Totals, seconds: float, best: Ideal | None) -> Speed | None:
    """Return the speed of the steps from `first` to `last`; None without steps or time."""
    steps = last.steps - first.steps
    if not steps or seconds <= 0:
        return None
    tokens = None if last.tokens is None or first.tokens is None else last.tokens - first.tokens
    done = Totals(steps, last.samples - first.samples, tokens)
    mfu = best.utilization(done, seconds) if best else None
    return Speed(done.samples / seconds, None if tokens is None else tokens / seconds, seconds / steps, mfu)
