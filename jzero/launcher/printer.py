"""Write the output of a job in a thread, so that a reader that pauses (`| less`) does not block the job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable


class Printer:
    """Writes lines to stdout (1) and stderr (2); calls `closed` in the event loop's thread when the reader has gone."""

    def __init__(self, closed: Callable[[], None]):
        self._closed, self._lines = closed, queue.SimpleQueue[tuple[str, int] | None]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)

    def put(self, line: str, number: int) -> None:
        """Write a line to stdout (1) or stderr (2)."""
        if not self._thread.is_alive() and self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        self._lines.put((line, number))

    def end(self) -> None:
        """Write the remaining lines; give up after 5 s on a reader that does not read."""
        self._lines.put(None)
        if self._loop:
            self._thread.join(5)

    def _write(self) -> None:
        streams = {1: sys.stdout, 2: sys.stderr}
        for stream in streams.values():
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        while item := self._lines.get():
            line, number = item
            try:
                print(line, file=streams[number], flush=True)
            except OSError:
                streams[number] = open(os.devnull, "w")  # noqa: SIM115  # the following lines must not fail too
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._closed)  # type: ignore[union-attr]
