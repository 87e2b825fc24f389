"""Write a job's output in a thread, and know the lines that JAX's C++ libraries print in every start.

Such noise hides the cause of a failure in a job's last lines. Run as a program, this file copies its input to its
output without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|I\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+:\d+\] "  # absl's level INFO; warnings may be the cause
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: I \S+:\d+\] "  # the same in the format of TensorFlow
    r"|.* cudart_stub\.cc:\d+\] "
    r"|\[Gloo\] Rank \d+ is connected to "
)


def is_noise(line: str) -> bool:
    """Return whether a line has nothing to do with how a process ends.

    >>> is_noise("I0000 00:00:1795431811.963961   25986 cudart_stub.cc:31] Could not find cuda drivers")
    True
    >>> is_noise("E0000 00:00:1795431811.963961   25986 hlo_rendezvous.cc:31] This thread is stuck")
    False
    """
    return bool(_NOISE.match(line))


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop noise from what this process, with its C++ libraries, writes to stderr."""
    # Another process drops it, so that the last words of a crash arrive.
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, "-I", __file__], stdin=reading, stdout=2):
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(writing, 2)
        os.close(reading)
        os.close(writing)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)


class Printer:
    """Writes lines to stdout (1) and stderr (2); calls `closed` in the event loop's thread when the reader has gone.

    A thread writes, so that a reader that pauses (`| less`) does not block the job.
    """

    def __init__(self, closed: Callable[[], None]):
        self._closed, self._lines = closed, queue.SimpleQueue[tuple[str, int] | None]()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, line: str, number: int) -> None:
        self._lines.put((line, number))

    def end(self) -> None:
        """Write the remaining lines; give up after 5 s on a reader that does not read."""
        self._lines.put(None)
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
                    self._loop.call_soon_threadsafe(self._closed)


if __name__ == "__main__":
    for line in sys.stdin.buffer:
        if not is_noise(line.decode(errors="replace")):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
