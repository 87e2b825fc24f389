"""How a process ends by an exception: its last line names the step, and a ConfigError has an exit code of its own.

The launcher compares the last lines of two attempts: the same error after the same step will come a third time. It
never restarts a ConfigError unless it is a PassingError.
"""

from __future__ import annotations

import sys
from typing import Any

from jzero.distributed.exit_codes import CONFIG, UNAVAILABLE
from jzero.errors import ConfigError, PassingError, in_a_line

_installed = False
_step = 0


def install() -> None:
    """Have Python call `_end` after an exception that nothing catches."""
    global _installed
    if not _installed:
        _installed, before = True, sys.excepthook
        sys.excepthook = lambda *error: _end(before, *error)


def passed(step: int) -> None:
    """Record the global step that has just been taken."""
    global _step
    _step = step


def _end(before: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    before(kind, error, trace)
    if _step and isinstance(error, Exception):
        print(f"jzero: after step {_step}: {kind.__name__}: {in_a_line(error)}", file=sys.stderr, flush=True)
    if isinstance(error, ConfigError):
        sys.exit(UNAVAILABLE if isinstance(error, PassingError) else CONFIG)
