"""Follows steps and evaluations to their end on the devices, in a thread, so that no step waits for its metrics."""

from __future__ import annotations

import atexit
import contextlib
import math
import queue
import threading
import time
import weakref
from collections import deque
from typing import Any, NamedTuple

import jax

from jzero.batch import Amount
from jzero.engine.clock import DEVICE

WINDOW = 50  # steps over which a speed is measured
LAST = 10.0  # seconds to wait for the last step at the end; after the death of a peer it never comes
MOMENT = 2.0  # seconds to wait for it after an exception


class Given(NamedTuple):
    """A step or an evaluation that the devices were given.

    Attributes:
      part: of the clock, DEVICE for a step.
      results: scalars on the devices; those of a step are its metrics by name.
      number: of the step.
      amount: what its batch holds.
    """

    part: str
    results: Any
    number: int = 0
    amount: Amount = Amount()


class Totals(NamedTuple):
    """What the devices have finished: steps, samples, tokens (None: unknown), skipped steps; and when."""

    steps: int = 0
    samples: int = 0
    tokens: int | None = 0
    skipped: int = 0
    time: float = 0.0


class Finished:
    """What the devices have finished.

    Attributes:
      number, metrics: of the newest one; 0 and {} before the first.
      recent: the totals after each of the last steps; its last item is the newest.
    """

    def __init__(self) -> None:
        self.number, self.metrics = 0, dict[str, float]()
        self.recent = deque[Totals](maxlen=WINDOW + 1)
        self._given = self._done = 0
        self._part, self._idle = DEVICE, -math.inf
        self._queue: queue.SimpleQueue[Given | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def totals(self) -> Totals:
        return self.recent[-1] if self.recent else Totals()

    def works(self) -> tuple[str, float]:
        """Return the part of what the devices were given last, and when they finished it; see `Clock`."""
        return self._part, math.inf if self.busy() else self._idle

    def busy(self) -> bool:
        """Return whether the devices work."""
        return self._done < self._given

    def give(self, work: Given) -> None:
        """Follow a step or an evaluation that the devices have just been given."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True, name="jzero steps")
            self._thread.start()
            _started.add(self)
        self._part, self._given = work.part, self._given + 1
        self._queue.put(work)

    def stop(self) -> None:
        """End the thread after what was given so far."""
        self._queue.put(None)

    def close(self, seconds: float = LAST) -> None:
        """End the thread, and wait for it."""
        self.stop()
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))

    def _follow(self) -> None:
        while (work := self._queue.get()) is not None:
            values = None
            with contextlib.suppress(Exception):  # of the devices: the script gets it too
                values = jax.device_get(work.results)  # waits without Python's lock
            self._idle = time.perf_counter()
            self._done += 1
            if values is not None and work.part == DEVICE:
                with contextlib.suppress(Exception):  # the thread must go on, or all that waits for it never ends
                    self._record(work, {name: float(x) for name, x in values.items()})

    def _record(self, step: Given, metrics: dict[str, float]) -> None:
        before, amount = self.totals, step.amount
        tokens = None if before.tokens is None or amount.tokens is None else before.tokens + amount.tokens
        skipped = before.skipped + int(metrics.get("skipped", 0.0))
        self.number, self.metrics = step.number, metrics
        self.recent.append(Totals(before.steps + 1, before.samples + amount.samples, tokens, skipped, self._idle))


_started: weakref.WeakSet[Finished] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Wait a moment for every thread.

    Python stops a daemon thread where it next takes Python's lock. Inside one of JAX's calls, which are C++, that
    aborts the process, and its exit code is lost.
    """
    end = time.monotonic() + MOMENT
    for one in list(_started):
        one.close(end - time.monotonic())
