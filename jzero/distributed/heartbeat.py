"""Telling the launcher how many steps this process's devices have finished, and how many it has begun.

The launcher names a file in `JZERO_PROGRESS`. Where it sees no step finish for long, it has every process print its
stacks (SIGUSR2) and ends the job; the process that has begun fewest is the one that the others wait for.
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

_waiting: deque[jax.Array | None] | None = None
_begun = 0


def start() -> None:
    """Begin to count, in a thread, so that nothing waits for the devices; without a launcher, nothing."""
    global _waiting
    path = os.environ.get("JZERO_PROGRESS")
    if path and _waiting is None:
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        _waiting = deque()
        threading.Thread(target=_count, args=(path, _waiting), daemon=True, name="jzero progress").start()


def begin() -> None:
    """A step begins."""
    global _begun
    _begun += 1


def finished_when(x: jax.Array | None) -> None:
    """It has been finished once `x` is there; None: now."""
    if _waiting is not None:
        _waiting.append(x)


def _count(path: str, waiting: deque[Any]) -> None:
    finished, before = 0, None
    while True:
        while waiting and (waiting[0] is None or waiting[0].is_deleted() or waiting[0].is_ready()):
            waiting.popleft()
            finished += 1
        if before != (finished, _begun):
            before = finished, _begun
            with contextlib.suppress(OSError):
                with open(f"{path}.new", "w") as file:
                    file.write(f"{finished} {_begun}")
                os.replace(f"{path}.new", path)  # a reader never sees half of it
        time.sleep(0.2)
