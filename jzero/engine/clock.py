"""One clock for a run: its time since the last progress line and in total, divided into parts that add up to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from jzero.profiling import compile_times

DATA = "data"  # waiting for the micro-batches of an iterator, or of training_data
HOST = "host"  # checks, the batch's transfer to the devices, the call of the compiled step
COMPILE = "compile"  # of any program, in any part
DEVICE = "device"  # from the call of the step until its results are ready
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"  # what a save takes before training goes on
PROFILE = "profile"  # of one step, once in a run
START = "start"  # initialising or reading the state
SCRIPT = "script"  # between the calls of the engine
PARTS = (DATA, HOST, COMPILE, DEVICE, EVALUATION, CHECKPOINT, PROFILE, START, SCRIPT)


class Reading(NamedTuple):
    """A reading of the clock: samples per second, and milliseconds per step of each part."""

    speed: float
    parts: dict[str, float]


class Clock:
    """A stopwatch: each lap adds the time since the last lap to one part, so no time counts twice.

    Attributes:
      total: {part: seconds} since the clock was made.
    """

    def __init__(self, works: Callable[[], tuple[str, float]] = lambda: (DEVICE, -math.inf)):
        """Start the clock.

        Args:
          works: returns what the devices were given last (DEVICE: a step; EVALUATION), and when they finished it by
            `time.perf_counter`, inf while they work. While they do, the time is theirs, not that of the part that runs
            meanwhile on the host.
        """
        self._works = works
        self.total: dict[str, float] = {}
        self._compiled, self._lap = compile_times.seconds(), time.perf_counter()
        self._clear(0, 0)

    @property
    def elapsed(self) -> float:
        """The seconds since the clock was made."""
        return time.perf_counter() - self._lap + sum(self.total.copy().values())

    def restart(self, steps: int, samples: int) -> None:
        """Start measuring now, with a state `steps` steps and `samples` samples into the run."""
        self.lap(START)
        self._clear(steps, samples)

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part, without what JAX compiled in it."""
        now, compiled = time.perf_counter(), compile_times.seconds()
        spent = now - self._lap
        compiling = min(compiled - self._compiled, spent)
        work, until = self._works()
        working = min(max(until - self._lap, 0.0), spent - compiling)
        self._add(part, spent - compiling - working)
        if compiling:
            self._add(COMPILE, compiling)
        if working:
            self._add(work, working)
        self._lap, self._compiled = now, compiled

    def _add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        self.total[part] = self.total.get(part, 0.0) + seconds

    def read(self, steps: int, samples: int) -> Reading:
        """Measure the steps since the last restart or reading; `steps` and `samples` count from the run's start."""
        self.lap(HOST)
        count, seconds = steps - self._steps, self._seconds
        speed = (samples - self._samples) / sum(seconds.values())
        self._clear(steps, samples)
        return Reading(speed, {part: 1000 * seconds[part] / count for part in PARTS if part in seconds})

    def _clear(self, steps: int, samples: int) -> None:
        self._steps, self._samples = steps, samples
        self._seconds: dict[str, float] = {}
