"""How a process ends by an exception: a user's mistake is one line, and the last line names the step.

A ConfigError names its cause and its fix, so only the script's own line is of interest, not jzero's and JAX's hundred
frames; the same for Ctrl-C. JZERO_TRACEBACK=1 prints them. The launcher compares the last lines of two attempts: the
same error after the same step will come a third time. It never restarts a ConfigError unless it is a PassingError.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from jzero.distributed.exit_codes import CONFIG, UNAVAILABLE
from jzero.errors import ConfigError, PassingError, numbered, with_type

VARIABLE = "JZERO_TRACEBACK"
_INSTALLED = (f"{Path(__file__).parents[1]}/", f"{sysconfig.get_path('stdlib')}/", "<frozen ")

_installed = False
_step = 0
_ended_by = ""


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


def ended_by() -> str:
    """Return the exception that ends this process, as one line; "" if there is none."""
    return _ended_by


def _end(before: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _ended_by
    _ended_by = with_type(error) if isinstance(error, Exception) else kind.__name__
    after, last = f"after step {_step}: " if _step else "", ""
    short = isinstance(error, ConfigError | KeyboardInterrupt) and os.environ.get(VARIABLE, "0") in ("", "0")
    # A hook that the script installed, such as a reporter of crashes, must see every exception.
    if not short or before is not sys.__excepthook__:
        before(kind, error, trace)
    if isinstance(error, ConfigError):
        last = f"{_place(trace)}{after}{numbered(error)}"
    elif short:
        last = f"{_place(trace)}{after}interrupted ({VARIABLE}=1 prints the traceback)"
    elif after and isinstance(error, Exception):
        last = f"{after}{with_type(error)}"
    if last:
        print(f"jzero: {last}", file=sys.stderr, flush=True)
    if isinstance(error, ConfigError):
        sys.exit(UNAVAILABLE if isinstance(error, PassingError) else CONFIG)


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code, as "train.py:12: "; "" if there is none."""
    own = ""
    for frame, line in traceback.walk_tb(trace):
        path = frame.f_code.co_filename
        if not path.startswith(_INSTALLED) and not {"site-packages", "dist-packages"} & set(path.split("/")):
            own = f"{os.path.basename(path)}:{line}: "
    return own
