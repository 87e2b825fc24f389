"""One clock for a run: its time since the last progress line and in total, divided into parts that add up to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from jzero.profiling import compile_times

DATA = "data"  # waiting for the micro-batches of an iterator, or of training_data
PEERS = "peers"  # waiting for the other processes to have their micro-batches
HOST = "host"  # checks, the batch's transfer to the devices, the call of the compiled step
COMPILE = "compile"  # of any program, in any part
DEVICE = "device"  # from the call of the step until its results are ready
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"  # what a save takes before training goes on
PROFILE = "profile"  # of one step, once in a run
START = "start"  # initialising or reading the state
SCRIPT = "script"  # between the calls of the engine
PARTS = (DATA, PEERS, HOST, COMPILE, DEVICE, EVALUATION, CHECKPOINT, PROFILE, START, SCRIPT)


class Clock:
    """A stopwatch: each lap adds the time since the last lap to one part, so no time counts twice.

    Attributes:
      total: {part: seconds} since the clock was made.
    """

    def __init__(self, worked: Callable[[float, float], Mapping[str, float]] = lambda since, until: {}):
        """Start the clock.

        Args:
          worked: returns {part: seconds} that the devices worked between two times of `time.perf_counter`. That time is
            theirs, not that of the part that ran meanwhile on the host.
        """
        self._worked = worked
        self.total: dict[str, float] = {}
        self._compiled, self._lap = compile_times.seconds(), time.perf_counter()
        self._cached = compile_times.cached()
        self._clear(0)

    @property
    def elapsed(self) -> float:
        """The seconds since the clock was made."""
        return time.perf_counter() - self._lap + sum(self.total.copy().values())

    @property
    def cached(self) -> int:
        """The programs that came from the compilation cache since the clock was made."""
        return compile_times.cached() - self._cached

    def restart(self, steps: int) -> None:
        """Start measuring now, with a state `steps` steps into the run."""
        self.lap(START)
        self._clear(steps)

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part, without what JAX compiled in it or the devices worked."""
        now, compiled = time.perf_counter(), compile_times.seconds()
        spent = now - self._lap
        compiling = min(compiled - self._compiled, spent)
        left = spent - compiling
        for work, seconds in self._worked(self._lap, now).items():
            working = min(seconds, left)  # a program is compiled while the devices work on an earlier one
            self._add(work, working)
            left -= working
        self._add(part, left)
        if compiling:
            self._add(COMPILE, compiling)
        self._lap, self._compiled = now, compiled

    def _add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        self.total[part] = self.total.get(part, 0.0) + seconds

    def read(self, steps: int) -> dict[str, float]:
        """Return the milliseconds of each part per step since the last restart or reading.

        `steps` counts from the run's start.
        """
        self.lap(HOST)
        count, seconds = steps - self._steps, self._seconds
        self._clear(steps)
        return {part: 1000 * seconds[part] / count for part in PARTS if part in seconds}

    def _clear(self, steps: int) -> None:
        self._steps = steps
        self._seconds: dict[str, float] = {}
