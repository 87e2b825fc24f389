"""Report to the launcher how many steps this process has begun, and how many its devices have finished.

The launcher names a file in `JZERO_PROGRESS`. If no step finishes for --hang_timeout seconds, it makes every process
print its stacks (SIGUSR2) and ends the job; the others wait for the process that has begun the fewest steps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from jzero.distributed.place import find_place
from jzero.files import create


class Work(NamedTuple):
    """A step, an evaluation or a save that has begun; `steady`: a train step whose program has run before."""

    began: float
    steady: bool


_Waiting = deque[tuple[jax.Array | None, Work]]  # what each work gives, and the work
_waiting: _Waiting | None = None
_begun = _finished = 0
_open: Work | None = None  # begun, and not given to the devices yet
_moved = 0.0  # when a work last finished
_times: deque[float] = deque(maxlen=20)  # seconds of the last steady steps


def start_step_counter() -> None:
    """Start counting in a thread, so that training never waits for the devices; do nothing in a process that is alone.

    A process of the launcher is never alone.
    """
    global _waiting
    path = os.environ.get("JZERO_PROGRESS", "")
    if (path or find_place(os.environ).size > 1) and _waiting is None:
        if path:  # C code prints the stacks, even if Python is blocked
            faulthandler.register(signal.SIGUSR2, 2, all_threads=True)
        _waiting = deque()
        threading.Thread(target=_count, args=(path, _waiting), daemon=True, name="jzero progress").start()


def launched() -> bool:
    """Return whether the launcher watches this process."""
    return "JZERO_PROGRESS" in os.environ


@contextlib.contextmanager
def work(steady: bool = False, counts: bool = True) -> Iterator[Callable[[jax.Array | None], None]]:
    """Count a step, an evaluation or a save: begun now, finished at the end of the context.

    It gives a function that delays the finish until its argument is ready. A work that raises does not count, nor does
    one inside of another, whose part it is.

    Args:
      steady: whether it is a train step whose program has run before, and so takes as long as the last one.
      counts: whether it counts once it is over.
    """
    global _begun, _open
    results: list[jax.Array | None] = []
    if _open is not None:
        yield results.append
        return
    _begun, _open = _begun + 1, Work(time.monotonic(), steady)
    try:
        yield results.append
        if counts and _waiting is not None:
            _waiting.append((results[0] if results else None, _open))
    except BaseException:
        counts = False
        raise
    finally:
        _begun, _open = _begun - (not counts), None


def waiting() -> contextlib.AbstractContextManager[object]:
    """Count a wait for the other processes as a step that has begun, for as long as it lasts."""
    return work(counts=False)


def step_counts() -> tuple[int, int]:
    return _finished, _begun


def step_times() -> list[float]:
    """Return the seconds that each of the last steady steps took."""
    return list(_times)


def pending() -> tuple[float, bool]:
    """Return how long the oldest unfinished work has run, in seconds (0: there is none), and whether it is steady.

    The work that finished last may have delayed it, so its end counts as the begin.
    """
    try:
        first = _waiting[0][1] if _waiting else _open
    except IndexError:  # the other thread has just taken it
        first = _open
    return (time.monotonic() - max(first.began, _moved), first.steady) if first else (0.0, False)


def _count(path: str, waiting: _Waiting) -> None:
    global _finished, _moved
    before = None
    while True:
        while waiting and ((x := waiting[0][0]) is None or x.is_deleted() or x.is_ready()):  # type: ignore[attr-defined]
            now, (_, done) = time.monotonic(), waiting[0]
            if done.steady:
                _times.append(now - max(done.began, _moved))
            _finished, _moved = _finished + 1, now
            waiting.popleft()
        if path and before != (_finished, _begun):
            before = _finished, _begun
            with contextlib.suppress(OSError):  # a full disk must not end the training
                write(path, f"{_finished} {_begun}")
        time.sleep(0.2)


def write(path: str, text: str) -> None:
    """Write the file by a rename, so that the launcher never reads half of it."""
    with create(f"{path}.new") as file:
        file.write(text)
    os.replace(f"{path}.new", path)
