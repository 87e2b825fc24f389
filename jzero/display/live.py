"""The kind of a process's output, and a display that updates in place on a terminal or below a notebook's cell."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

TERMINAL, NOTEBOOK, PLAIN = "terminal", "notebook", "plain"  # the kinds of output
STREAMS = ("stdout", "stderr")


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


class Display(Protocol):
    """Shows what `render` returns, anew at each `refresh`."""

    def refresh(self) -> None: ...

    def is_left(self) -> bool:
        """Return whether the output now goes elsewhere, or somebody was asked for an input."""

    def stop(self, keep: bool) -> None:
        """End; leave the last state on the screen, or nothing."""


class Terminal:
    """The last lines of a terminal. What the program prints meanwhile goes above them.

    `input()`, and so a debugger's prompt, ends it: an update would write over the line that is being typed.
    """

    def __init__(self, render: Callable[[], RenderableType], console: Console | None = None):
        import rich
        from rich.live import Live

        console = console or rich.get_console()  # the one of a script's own displays, which then go together
        self._live = Live(
            get_renderable=render, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start(refresh=True)
        self._streams = {name: (getattr(sys, name), _above(self._live, getattr(sys, name))) for name in STREAMS}
        for name, (_, above) in self._streams.items():
            setattr(sys, name, above)
        self._input, self._ask = builtins.input, self._make_way
        builtins.input = self._ask
        console.show_cursor()  # a process that is killed could not bring it back

    def _make_way(self, *prompt: Any) -> str:
        self.stop(keep=True)
        return self._input(*prompt)

    def refresh(self) -> None:
        if self._live.is_started:
            self._live.refresh()

    def is_left(self) -> bool:
        return not self._live.is_started

    def stop(self, keep: bool) -> None:
        self._live.transient = not keep
        if builtins.input is self._ask:
            builtins.input = self._input
        for name, (before, above) in self._streams.items():
            if getattr(sys, name) is above:  # the script may have redirected it meanwhile
                setattr(sys, name, before)
        try:
            for _, above in self._streams.values():
                above.flush()
        finally:  # the terminal may be closed
            self._live.stop()


def _above(live: Live, stream: Any) -> Any:
    """Return a stream whose lines go above a display, and directly to `stream` once the display has ended.

    A bar of tqdm that begins under a display keeps the stream that it finds.
    """
    from rich.file_proxy import FileProxy

    class Above(FileProxy):
        def write(self, text: str) -> int:
            return super().write(text) if live.is_started else stream.write(text)

        def flush(self) -> None:
            super().flush()
            stream.flush()

    return stream if isinstance(stream, FileProxy) else Above(live.console, stream)


class Notebook:
    """The output of the cell that began it."""

    def __init__(self, render: Callable[[], RenderableType]):
        self._render = render
        self._cell = notebook().execution_count
        self._handle: Any = importlib.import_module("IPython.display").display(render(), display_id=True)

    def refresh(self) -> None:
        self._handle.update(self._render())

    def is_left(self) -> bool:
        return notebook().execution_count != self._cell

    def stop(self, keep: bool) -> None:
        pass  # a notebook keeps its output


def opener(wanted: bool | str) -> Callable[[Callable[[], RenderableType]], Display] | None:
    """Return the kind of display for this process's output; None for plain text.

    Args:
      wanted: "auto", or whether there must be one.
    """
    if wanted is False:
        return None
    here = kind()
    if here == PLAIN and wanted == "auto":
        return None
    if here == PLAIN:
        from rich.console import Console

        return lambda render: Terminal(render, Console(force_terminal=True))
    return Notebook if here == NOTEBOOK else Terminal


def bar_of_script() -> bool:
    """Return whether the script shows a bar of tqdm, which a display would overwrite."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return any(not bar.disable for bar in list(getattr(bars, "_instances", ())))
