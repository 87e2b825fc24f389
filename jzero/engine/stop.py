"""After SIGTERM: save, and end the process with a code that asks for another start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

import jax

from jzero import checkpoint
from jzero.distributed.exit_codes import SAVED
from jzero.distributed.place import log_dist


def save_and_exit(save: Callable[[], checkpoint.Save]) -> NoReturn:
    """Call `save`, wait for the checkpoint and exit; all processes call it after the same step."""
    checkpoint.forgive()  # the error of an earlier save must not stop the last one
    path = save().wait()
    log_dist(f"jzero: SIGTERM: saved {path}; exit code {SAVED}")
    if jax.process_count() > 1:
        jax.distributed.shutdown()  # waits for all: if process 0 exited first, the others would see a crash
    sys.exit(SAVED)
