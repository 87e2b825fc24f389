"""Waits in a thread for what the devices were given, so that no step waits for its own results."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jzero.errors import with_type

LAST_STEP_TIMEOUT = 10.0  # seconds to wait for the last step at the end; after the death of a peer it never comes

Then = Callable[[Any, float], None]  # is called with the results' values and the time by `time.perf_counter`


class DeviceWork:
    """A step or an evaluation on the devices: its part of the clock, when they were given it and when they ended it."""

    def __init__(self, part: str):
        self.part, self.given = part, time.perf_counter()
        self.end: float | None = None


class ResultWaiter:
    """Follows results of the devices to their end, in the order in which they were given.

    The devices run one program after another, so the oldest work that has not ended is the one they run.

    Args:
      follows: whether anybody asks for them; otherwise `begin` and `give` do nothing.
    """

    def __init__(self, follows: bool = True) -> None:
        self.follows = follows
        self._queue: queue.SimpleQueue[tuple[Any, Then | None, DeviceWork | None] | None] = queue.SimpleQueue()
        self._works = deque[DeviceWork]()
        self._thread: threading.Thread | None = None
        self._closed, self._lost = False, False

    def follow(self) -> None:
        """Follow results from now on."""
        self.follows = True

    def begin(self, part: str, results: Any) -> None:
        """Note that the devices have just been given a program, which has ended once its results are there."""
        if self.follows and not self._closed:
            self._works.append(DeviceWork(part))
            self.give(results, None, self._works[-1])

    def give(self, results: Any, then: Then | None, work: DeviceWork | None = None) -> None:
        """Call `then` with the values of `results` once they are there, in the waiter's thread.

        Args:
          results: a tree of arrays on the devices; None: `then` is called after those of earlier results.
          then: not called if the devices fail; the script gets that error.
          work: ends with these results.
        """
        if self._closed or not self.follows:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="jzero follower")
            self._thread.start()
            _open.add(self)
        self._queue.put((results, then, work))

    def busy(self) -> bool:
        """Return whether the devices work."""
        works = list(self._works)
        return bool(works) and works[-1].end is None

    def worked(self, since: float, until: float) -> Mapping[str, float]:
        """Return {part: seconds} that the devices worked in this time, and forget what ended before."""
        found, before = dict[str, float](), since
        for work in list(self._works):
            end = until if work.end is None else min(work.end, until)
            begin = max(work.given, before)
            if end > begin:
                found[work.part] = found.get(work.part, 0.0) + end - begin
            before = max(before, end)
        while self._works and self._works[0].end is not None and self._works[0].end <= until:
            self._works.popleft()
        return found

    def ended(self) -> None:
        """Note that all work so far has ended: the host has waited for it, and knows it before the thread does."""
        now = time.perf_counter()
        for work in list(self._works):
            work.end = now if work.end is None else work.end

    def settle(self, seconds: float | None = None) -> None:
        """Wait until all that was given has ended, for a limited time; once a wait has failed, return at once."""
        thread = self._thread
        if thread is None or self._closed or self._lost:
            return
        if thread is threading.current_thread() or not thread.is_alive():  # it collects an engine; a fork has none
            return
        done = threading.Event()
        self.give(None, lambda values, end: done.set())
        self._lost = not done.wait(_limit() if seconds is None else seconds) and seconds is None

    def close(self, seconds: float | None = None) -> None:
        """Take nothing more, and end the thread after what was given so far; wait for it as `settle` does."""
        self._closed = True
        if self._thread is None:
            return
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(0.0 if self._lost else _limit() if seconds is None else max(0.0, seconds))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            (results, then, work), values = item, None
            try:
                values = jax.device_get(results)  # waits without Python's lock
            except BaseException:  # of the devices: the script gets it too
                then = None
            end = time.perf_counter()
            if work is not None and work.end is None:
                work.end = end
            try:
                if then is not None:
                    then(values, end)
            except BaseException as error:  # the thread must go on, or all that waits for it never ends
                warn(error)


def warn(error: BaseException) -> None:
    """Warn that the display or the record of an event has failed."""
    with contextlib.suppress(RuntimeWarning):  # Python was told to raise warnings
        warnings.warn(f"a step is not shown or recorded: {with_type(error)}", RuntimeWarning, 3)


def _limit() -> float | None:
    """Return the seconds to wait at the end: without peers every step ends or fails, however long it takes."""
    return LAST_STEP_TIMEOUT if jax.process_count() > 1 else None


_open: weakref.WeakSet[ResultWaiter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Wait for every thread.

    Python stops a daemon thread where it next takes Python's lock. Inside one of JAX's calls, which are C++, that
    aborts the process, and its exit code is lost.
    """
    end = time.monotonic() + LAST_STEP_TIMEOUT
    for one in list(_open):
        one.close(end - time.monotonic())
