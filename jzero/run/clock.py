"""One clock for a run: its time, divided into parts that add up to it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jax

from jzero.events import Moment

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


COMPILING = "/jax/core/compile/"  # tracing, lowering, and XLA's compilation or what JAX's cache has instead
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Compilations:
    """Counts what JAX compiles in this process, as its events tell.

    Attributes:
      seconds: spent on tracing, lowering and compiling, each once where they contain another.
      cached: the programs that came from JAX's persistent cache.
    """

    def __init__(self) -> None:
        self.seconds, self.cached = 0.0, 0
        self._counted = threading.local()  # spans: [(begin, end)] of this thread's events, by `time.perf_counter`

    def count(self, event: str, **_: object) -> None:
        """Take an event without a duration."""
        self.cached += event == CACHE_HIT

    def add(self, event: str, duration_secs: float, **_: object) -> None:
        """Take an event that has just ended."""
        if not event.startswith(COMPILING):
            return
        end = time.perf_counter()
        begin, spans = end - duration_secs, vars(self._counted).setdefault("spans", [])
        while spans and spans[-1][1] > begin:  # a constant that was computed while this one traced
            inner_begin, inner_end = spans.pop()
            duration_secs -= inner_end - max(begin, inner_begin)
        spans.append((begin, end))
        self.seconds += duration_secs


compilations = Compilations()
# Once in a process: JAX compiles a program for all engines, and each clock subtracts what came before it.
jax.monitoring.register_event_listener(compilations.count)
jax.monitoring.register_event_duration_secs_listener(compilations.add)


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
        self._compiled, self._lap = compilations.seconds, time.perf_counter()
        self._cached = compilations.cached

    @property
    def elapsed(self) -> float:
        """The seconds since the clock was made."""
        return time.perf_counter() - self._lap + sum(self.total.copy().values())

    @property
    def cached(self) -> int:
        """The programs that came from the compilation cache since the clock was made."""
        return compilations.cached - self._cached

    def lap(self, part: str) -> Moment:
        """Add the time since the last lap to a part, without what JAX compiled in it or the devices worked."""
        now, compiled = time.perf_counter(), compilations.seconds
        spent = now - self._lap
        compiling = min(compiled - self._compiled, spent)
        left = spent - compiling
        total = self.total
        for work, seconds in self._worked(self._lap, now).items():
            working = min(seconds, left)  # a program is compiled while the devices work on an earlier one
            total[work] = total.get(work, 0.0) + working
            left -= working
        total[part] = total.get(part, 0.0) + left
        if compiling:
            total[COMPILE] = total.get(COMPILE, 0.0) + compiling
        self._lap, self._compiled = now, compiled
        return Moment(now, total.copy())

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Moment]:
        """Time this context as one part; the time since the last part counts as the script's."""
        began = self.lap(SCRIPT)
        try:
            yield began
        finally:
            self.lap(name)


def per_step(since: Mapping[str, float], until: Mapping[str, float], steps: int) -> dict[str, float]:
    """Return the milliseconds per step of each part that grew between two moments.

    >>> per_step({DATA: 1.0, HOST: 1.0}, {HOST: 1.5, DEVICE: 2.0, DATA: 1.0}, steps=2)
    {'host': 250.0, 'device': 1000.0}
    """
    grown = {part: until.get(part, 0.0) - since.get(part, 0.0) for part in PARTS}
    return {part: 1000 * seconds / steps for part, seconds in grown.items() if seconds}
