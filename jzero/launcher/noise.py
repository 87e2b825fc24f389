"""Lines that JAX's C++ libraries print in every start: they hide the cause of a failure in a job's last lines.

Run as a program it copies its input to its output without them.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

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


if __name__ == "__main__":
    for line in sys.stdin.buffer:
        if not is_noise(line.decode(errors="replace")):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
