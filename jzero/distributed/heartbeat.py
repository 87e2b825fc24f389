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
from typing import Any

import jax

from jzero.distributed.place import find_place
from jzero.files import create

_waiting: deque[tuple[jax.Array | None, float]] | None = None  # what each step gives, and when it began
_begun = _finished = 0
_open = 0.0  # when the step began that has not been given to the devices yet; 0: there is none
_moved = 0.0  # when a step last finished
_times: deque[float] = deque(maxlen=20)  # seconds of the last steps


def start() -> None:
    """Start counting in a thread, so that training never waits for the devices; do nothing in a process that is alone.

    A process of the launcher is never alone.
    """
    global _waiting
    path = os.environ.get("JZERO_PROGRESS", "")
    if (path or find_place(os.environ).size > 1) and _waiting is None:
        if path:  # C code prints the stacks, even if Python is blocked
            faulthandler.register(signal.SIGUSR2, all_threads=True)
        _waiting = deque()
        threading.Thread(target=_count, args=(path, _waiting), daemon=True, name="jzero progress").start()


def launched() -> bool:
    """Return whether the launcher watches this process."""
    return "JZERO_PROGRESS" in os.environ


def begin() -> None:
    """Count a step that begins."""
    global _begun, _open
    _begun, _open = _begun + 1, time.monotonic()


def finished_when(x: jax.Array | None) -> None:
    """Count the step as finished once `x` is ready; None: now."""
    global _open
    if _waiting is not None:
        _waiting.append((x, _open))
    _open = 0.0


def counts() -> tuple[int, int]:
    """Return the steps finished and the steps begun."""
    return _finished, _begun


def times() -> list[float]:
    """Return the seconds that each of the last steps took."""
    return list(_times)


def idle() -> float:
    """Return the seconds since a step last finished or the current one began; 0 if there is nothing to wait for."""
    try:
        first = _waiting[0][1] if _waiting else _open
    except IndexError:  # the other thread has just taken it
        first = _open
    return time.monotonic() - max(first, _moved) if first else 0.0


def _count(path: str, waiting: deque[Any]) -> None:
    global _finished, _moved
    before = None
    while True:
        while waiting and (waiting[0][0] is None or waiting[0][0].is_deleted() or waiting[0][0].is_ready()):
            now, (_, began) = time.monotonic(), waiting[0]
            _times.append(now - max(began, _moved))
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
