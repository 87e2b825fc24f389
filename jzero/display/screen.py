"""What kind of output a process has: a terminal, a notebook, or plain text such as a log file."""

from __future__ import annotations

import sys
from typing import Any

TERMINAL, NOTEBOOK, PLAIN = "terminal", "notebook", "plain"


def kind() -> str:
    """Return the kind of this process's output.

    A Python prompt counts as plain: a display that updates in place would write over the line that is being typed.
    """
    if notebook() is not None:
        return NOTEBOOK
    from rich.console import Console

    streams = (sys.stdout, sys.stderr)  # both: the lines of one that is redirected may reach the screen by another way
    both = all(stream is not None and stream.isatty() for stream in streams)
    prompt = hasattr(sys, "ps1") or sys.flags.interactive
    return TERMINAL if both and not prompt and not Console().is_dumb_terminal else PLAIN


def notebook() -> Any:
    """Return the IPython shell of a notebook's kernel; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if getattr(shell, "kernel", None) is not None else None
