"""How fast a run is: samples, tokens, MFU, and how long it will still take."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jzero.batch import Amount
from jzero.engine.clock import DATA, DEVICE, HOST, PEERS, PROFILE, SCRIPT, Clock
from jzero.engine.finished import Finished, Totals
from jzero.profiling.flops import step_flops
from jzero.train_step import TrainStep

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
        alike = totals.samples == totals.steps * self.amount.samples
        alike &= totals.tokens == (None if self.amount.tokens is None else totals.steps * self.amount.tokens)
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


def recent(finished: Finished, best: Ideal | None) -> Speed | None:
    """Return the speed of the last steps, with all that comes between them."""
    steps = list(finished.recent)
    return between(steps[0], steps[-1], steps[-1].time - steps[0].time, best) if steps else None


def training(finished: Finished, clock: Clock, best: Ideal | None) -> Speed | None:
    """Return the speed of the whole run in the time of its steps, without start, compile, evaluation and saves."""
    return between(Totals(), finished.totals, sum(clock.total.get(part, 0.0) for part in TRAINING), best)


def remaining(finished: Finished, total: int | None) -> float | None:
    """Return the seconds to the step `total`, at the speed of the last ones; None if that is unknown."""
    speed = recent(finished, None)
    return None if total is None or speed is None else max(0, total - finished.number) * speed.step
