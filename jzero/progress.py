"""Telling the launcher how many steps this process's devices have finished.

The launcher names a file in `JZERO_PROGRESS`. Where it sees no step finish for long, it has every process print its
stacks (SIGUSR2) and ends the job.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections import deque
from typing import Any

import jax

_waiting: deque[jax.Array] | None = None


def start() -> None:
    """Begin to count, in a thread, so that nothing waits for the devices; without a launcher, nothing."""
    global _waiting
    path = os.environ.get("JZERO_PROGRESS")
    if path and _waiting is None:
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        _waiting = deque()
        threading.Thread(target=_count, args=(path, _waiting), daemon=True, name="jzero progress").start()


def finished_when(x: jax.Array) -> None:
    """A step has been finished once `x` is there."""
    if _waiting is not None:
        _waiting.append(x)


def _count(path: str, waiting: deque[Any]) -> None:
    steps = 0
    _write(path, steps)
    while True:
        time.sleep(0.2)
        before = steps
        while waiting and (waiting[0].is_deleted() or waiting[0].is_ready()):
            waiting.popleft()
            steps += 1
        if steps > before:
            _write(path, steps)


def _write(path: str, steps: int) -> None:
    with open(f"{path}.new", "w") as file:
        file.write(str(steps))
    os.replace(f"{path}.new", path)  # a reader never sees half of it
