"""End a process by an exception with a last line that names the step, and tell the next attempt why this one ended.

A ConfigError names its cause and its fix, so only the script's own line is of interest, not jzero's and JAX's hundred
frames; the same for Ctrl-C. JZERO_TRACEBACK=1 prints them. The launcher compares the last lines of two attempts: the
same error after the same step will come a third time. It never restarts a ConfigError unless it is a PassingError. It
tells the processes of the next attempt how the earlier ones ended, for their ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from jzero.errors import ConfigError, PassingError, numbered, with_type

# Exit codes with a meaning of their own, for processes, the launcher and the system that started it.
UNAVAILABLE = 69  # another process was lost, or a file system failed: EX_UNAVAILABLE of sysexits.h
SAVED = 75  # all processes saved a checkpoint after SIGTERM; start the job again: EX_TEMPFAIL of sysexits.h
CONFIG = 78  # an invalid config, model or call, which another start does not change: EX_CONFIG of sysexits.h
HUNG = 124  # no step finished for --hang_timeout seconds: the exit code of timeout(1)

TRACEBACK, OUTAGES = "JZERO_TRACEBACK", "JZERO_OUTAGES"  # environment variables
MOST_OUTAGES = 20  # that the variable holds: each has a line of text
LONGEST_REASON = 500  # characters
_INSTALLED = (f"{Path(__file__).parents[1]}/", f"{sysconfig.get_path('stdlib')}/", "<frozen ")

# PyTorch's methods on a batch or a loss. jzero's own types raise such errors themselves; JAX's and Python's cannot.
_PLACED, _HOST = "leave it out: jzero puts batches on the devices", "write np.asarray(x)"
_HABITS = {
    "to": _PLACED,
    "cuda": _PLACED,
    "cpu": _HOST,
    "numpy": _HOST,
    "detach": _HOST,
    "backward": "write engine.backward(loss), with the loss as the engine returned it",
}

_installed = False
_step = 0
_ended_by = ""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install() -> None:
    """Have Python call `_end` after an exception that nothing catches."""
    global _installed
    if not _installed:
        _installed, before = True, sys.excepthook
        sys.excepthook = lambda *error: _end(before, *error)


def record_step(step: int) -> None:
    """Record the global step that has just been taken."""
    global _step
    _step = step


def ended_by() -> str:
    """Return the exception that ends this process, as one line; "" if there is none."""
    return _ended_by


def _end(before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _ended_by
    _ended_by = with_type(error) if isinstance(error, Exception) else kind.__name__
    after, last = f"after step {_step}: " if _step else "", ""
    short = isinstance(error, ConfigError | KeyboardInterrupt) and os.environ.get(TRACEBACK, "0") in ("", "0")
    # A hook that the script installed, such as a reporter of crashes, must see every exception.
    if not short or before is not sys.__excepthook__:
        before(kind, error, trace)
    if isinstance(error, ConfigError):
        last = f"{_place(trace)}{after}{numbered(error)}"
    elif short:
        last = f"{_place(trace)}{after}interrupted ({TRACEBACK}=1 prints the traceback)"
    elif isinstance(error, AttributeError) and (fix := _instead(error)):
        last = f"{_place(trace)}{after}{with_type(error)}; {fix}"
    elif after and isinstance(error, Exception):
        last = f"{after}{with_type(error)}"
    if last:
        print(f"jzero: {last}", file=sys.stderr, flush=True)
    if isinstance(error, ConfigError):
        sys.exit(UNAVAILABLE if isinstance(error, PassingError) else CONFIG)


def _instead(error: AttributeError) -> str:
    """Return what to write instead of a PyTorch habit on an array, a dict, a list or a tuple; "" for other errors."""
    array = "jax" in sys.modules and isinstance(error.obj, sys.modules["jax"].Array)
    return _HABITS.get(error.name or "", "") if array or isinstance(error.obj, dict | list | tuple) else ""


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code, as "train.py:12: "; "" if there is none."""
    own = ""
    for frame, line in traceback.walk_tb(trace):
        path = frame.f_code.co_filename
        if not path.startswith(_INSTALLED) and not {"site-packages", "dist-packages"} & set(path.split("/")):
            own = f"{os.path.basename(path)}:{line}: "
    return own


class Outage(NamedTuple):
    """The end of an attempt.

    Attributes:
      attempt: the JZERO_ATTEMPT of its processes.
      died: the last sign of life, in UTC seconds: the end of a process, the last step before a hang.
      noticed: when the launcher ended the attempt, in UTC seconds.
      code, reason: the exit code, and why in one line.
    """

    attempt: str
    died: float
    noticed: float
    code: int
    reason: str


def pack_outages(outages: Sequence[Outage]) -> dict[str, str]:
    """Return the variable for the next attempt.

    >>> read_outages(pack_outages([Outage("a 0", 1.0, 2.5, 1, "rank 0 exited with code 1")]))
    [Outage(attempt='a 0', died=1.0, noticed=2.5, code=1, reason='rank 0 exited with code 1')]
    """
    shortened = [outage._replace(reason=outage.reason[:LONGEST_REASON]) for outage in outages[-MOST_OUTAGES:]]
    return {OUTAGES: json.dumps(shortened)} if outages else {}


def read_outages(env: Mapping[str, str]) -> list[Outage]:
    """Read the outages before this attempt, the oldest first; none from a variable that `pack_outages` did not make."""
    with contextlib.suppress(ValueError, TypeError):
        return [
            Outage(str(attempt), float(died), float(noticed), int(code), str(reason))
            for attempt, died, noticed, code, reason in json.loads(env.get(OUTAGES, "[]"))
        ]
    return []
