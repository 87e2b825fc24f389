"""Spikes of the loss and the gradient norm: steps far above the last ones.

The rule is Hampel's identifier: a value is a spike if it exceeds the median of the last values by `threshold` standard
deviations, where 1.4826 times the median absolute deviation (MAD) stands for one (Hampel, 1974, "The influence curve
and its role in robust estimation"). Spikes in the window do not raise that limit, as they raise a mean and a deviation.
Window, threshold and the number of steps before the first limit are those of OLMo-core's SkipStepOptimizer, which
skips such updates (olmo_core/optim/skip_step_optimizer.py).

Limits are computed on the host, from steps that have finished, and are an input of the next step: the device decides
whether it is skipped, and nothing waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jzero.events import Noticed
from jzero.loss import LOSS
from jzero.run.diagnosis.watch import Stream, WatchedRun
from jzero.step.programs import Details
from jzero.step.train_step import Metrics, TrainStep

NORM, SPIKE = "grad_norm", "spike"
LEAST = 20  # steps, or half of the window if that is more, before the first limit
FLOOR = 0.01  # of the median: the least deviation, for a run whose values hardly change
MOST_LINES = 50  # of one run


class Given(NamedTuple):
    """A step that the devices may still compute, and the limits that it got."""

    number: int
    metrics: Metrics
    limits: np.ndarray


class Spikes:
    """Looks for spikes in the steps of one engine; with the action "skip", such steps change nothing."""

    def __init__(self, step: TrainStep, stream: Stream):
        section, self._stream = step.config.spikes, stream
        self._skips, self.is_on = section.action == "skip", section.action != "ignore"
        self._window, self._threshold = section.window, section.threshold
        self._values = tuple(deque[float](maxlen=self._window) for _ in range(2))
        self._limits, self._lines = np.full(2, np.inf, np.float32), 0

    def begin(self) -> np.ndarray | None:
        """Return the largest loss and gradient norm of the next step, if it is skipped above them; else None."""
        return self._limits if self._skips else None

    def take(self, run: WatchedRun, metrics: Metrics, details: Details) -> Given:
        """Keep a step, with the limits that it got."""
        return Given(run.global_steps, metrics, self._limits)

    def read(self, run: WatchedRun, step: Given) -> None:
        """Look at a step, and compute the limits of the step after the next."""
        pair = jax.device_get((step.metrics[LOSS], step.metrics[NORM]))
        if not all(map(math.isfinite, pair)):
            return
        high = [
            f"{name} {value:.4g} (limit {most:.4g}, median {np.median(values):.4g})"
            for name, value, most, values in zip(
                ("loss", "gradient norm"), pair, step.limits, self._values, strict=True
            )
            if value > most
        ]
        # Spikes count too: should the run stay on a higher level, that becomes the median.
        for values, value in zip(self._values, pair, strict=True):
            values.append(float(value))
        if high and self._lines < MOST_LINES:
            self._lines += 1
            effect = ", the step changed nothing" if self._skips else ""
            self._stream.emit(Noticed(step.number, SPIKE, f"{SPIKE}: {', '.join(high)}{effect}"))
        if len(self._values[0]) >= max(LEAST, self._window // 2):
            self._limits = np.array([spike_threshold(values, self._threshold) for values in self._values], np.float32)


def spike_threshold(values: Sequence[float], threshold: float) -> float:
    """Compute the largest value that is no spike after these.

    >>> spike_threshold([1.0, 2.0, 3.0, 4.0, 100.0], 6.0)
    11.8956
    """
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(values) - median)))
    return median + threshold * max(deviation, FLOOR * abs(median))
