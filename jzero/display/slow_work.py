"""Notices of slow work: "compiling the step, 12 s", so that nobody takes a long wait for a hang."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jzero._compat import backends_are_initialized
from jzero.display import live
from jzero.distributed.compilation_cache import DIRECTORY, ENABLED
from jzero.distributed.place import get_rank
from jzero.errors import ConfigError, one_line

FIRST = 5.0  # seconds before the first notice; without a terminal the next ones come at 10, 20, 40 s ...


class SlowWork(NamedTuple):
    """Work that has begun: what it is, and since when."""

    what: str
    began: float

    @property
    def seconds(self) -> int:
        return round(time.monotonic() - self.began)

    def __str__(self) -> str:
        return f"{self.what}, {self.seconds} s"


_open: list[SlowWork] = []  # the innermost last
_taken = 0  # displays that show `current()` themselves
_line = threading.Lock()  # held by the thread that updates the terminal's line


def current() -> SlowWork | None:
    """Return the innermost work that has run for `FIRST` seconds; None if there is none."""
    late = [work for work in list(_open) if time.monotonic() - work.began >= FIRST]
    return late[-1] if late else None


@contextlib.contextmanager
def shown_elsewhere() -> Iterator[None]:
    """Leave the notices to a display that shows `current()`."""
    global _taken
    _taken += 1
    try:
        yield
    finally:
        _taken -= 1


@contextlib.contextmanager
def slow_work(what: str) -> Iterator[None]:
    """Show on process 0 that this work goes on, from its fifth second.

    A terminal has one line, which updates and goes away; a log file gets a line whenever the time has doubled.

    Args:
      what: as "saving global_step100".
    """
    if not _prints():
        yield
        return
    work, done = SlowWork(one_line(what), time.monotonic()), threading.Event()
    _open.append(work)
    with contextlib.suppress(RuntimeError):  # at the end of the program Python may allow no new threads
        threading.Thread(target=_watch, args=(work, done.wait), daemon=True, name="jzero slow work").start()
    try:
        yield
    finally:
        _open.remove(work)
        done.set()


def _prints() -> bool:
    """Return whether this is process 0, without starting JAX's devices: processes must join before."""
    if backends_are_initialized():
        return jax.process_index() == 0
    with contextlib.suppress(ConfigError):  # joining raises it
        return get_rank() == 0
    return True


def compiling(program: str) -> str:
    """Describe the compilation of a program, and whether JAX's cache spares it to the next start."""
    cached = getattr(jax.config, ENABLED) and getattr(jax.config, DIRECTORY)
    return f"compiling {program}" + (" (cached for the next start)" if cached else "")


def _watch(work: SlowWork, wait: Callable[[float], bool]) -> None:
    """Show `work` until it is done; `wait(seconds)` returns whether it is."""
    if not wait(FIRST):
        (_update if live.kind() == live.TERMINAL else _print)(work, wait)


def _update(work: SlowWork, wait: Callable[[float], bool]) -> None:
    import rich
    from rich.live import Live

    console = rich.get_console()  # the one of a script's own displays, which then go together
    while not wait(0.2):
        if not _taken and _line.acquire(blocking=False):
            with _line_released(), Live(get_renderable=_text, console=console, transient=True, refresh_per_second=2):
                console.show_cursor()  # a process that is killed could not bring it back
                while not _taken and not wait(0.2):
                    pass


@contextlib.contextmanager
def _line_released() -> Iterator[None]:
    try:
        yield
    finally:
        _line.release()


def _text() -> Any:
    from rich.text import Text

    return Text(f"jzero: {current() or ''}", style="dim")


def _print(work: SlowWork, wait: Callable[[float], bool]) -> None:
    seconds, said = FIRST, False
    while True:
        if not _taken and list(_open)[-1:] == [work]:  # a copy, since the work may end meanwhile
            print(f"jzero: {work}", file=sys.stderr, flush=True)
            said = True
        if wait(seconds):
            break
        seconds *= 2
    if said:
        print(f"jzero: {work.what}: done after {work.seconds} s", file=sys.stderr, flush=True)
