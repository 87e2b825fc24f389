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

from jzero.files import create

_waiting: deque[jax.Array | None] | None = None
_begun = 0


def start() -> None:
    """Start counting in a thread, so that training never waits for the devices; do nothing without the launcher."""
    global _waiting
    path = os.environ.get("JZERO_PROGRESS")
    if path and _waiting is None:
        faulthandler.register(signal.SIGUSR2, all_threads=True)  # C code prints the stacks, even if Python is blocked
        _waiting = deque()
        threading.Thread(target=_count, args=(path, _waiting), daemon=True, name="jzero progress").start()


def begin() -> None:
    """Count a step that begins."""
    global _begun
    _begun += 1


def finished_when(x: jax.Array | None) -> None:
    """Count the step as finished once `x` is ready; None: now."""
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
            with contextlib.suppress(OSError):  # a full disk must not end the training
                write(path, f"{finished} {_begun}")
        time.sleep(0.2)


def write(path: str, text: str) -> None:
    """Write the file by a rename, so that the launcher never reads half of it."""
    with create(f"{path}.new") as file:
        file.write(text)
    os.replace(f"{path}.new", path)
