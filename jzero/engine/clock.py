"""One clock for a run: the time since the last progress line, divided into parts that add up to it."""

from __future__ import annotations

import time
from typing import NamedTuple

DATA = "data"  # waiting for the micro-batches of an iterator, or of training_data
HOST = "host"  # checks, the batch's transfer to the devices, the call of the compiled step and its compilation
DEVICE = "device"  # from there until the results of the step are ready
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"  # what a save takes before training goes on
PROFILE = "profile"  # of one step, once in a run
SCRIPT = "script"  # between the calls of the engine
PARTS = (DATA, HOST, DEVICE, EVALUATION, CHECKPOINT, PROFILE, SCRIPT)


class Reading(NamedTuple):
    """A reading of the clock: samples per second, and milliseconds per step of each part."""

    speed: float
    parts: dict[str, float]


class Clock:
    """A stopwatch: each lap adds the time since the last lap to one part, so no time counts twice."""

    def __init__(self) -> None:
        self.restart(0, 0)

    def restart(self, steps: int, samples: int) -> None:
        """Start measuring now, `steps` steps and `samples` samples into the run."""
        self._steps, self._samples = steps, samples
        self._seconds: dict[str, float] = {}
        self._lap = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._lap
        self._lap = now

    def read(self, steps: int, samples: int) -> Reading:
        """Measure the steps since the last restart or reading; `steps` and `samples` count from the run's start."""
        self.lap(HOST)
        count, seconds = steps - self._steps, self._seconds
        speed = (samples - self._samples) / sum(seconds.values())
        self._steps, self._samples, self._seconds = steps, samples, {}
        return Reading(speed, {part: 1000 * seconds[part] / count for part in PARTS if part in seconds})
