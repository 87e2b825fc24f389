"""End the command whatever happens: by a signal even if it is stuck, and after an exception that nobody expected.

Python runs signal handlers in the main thread, between two bytecodes; asyncio runs its own in the event loop. A look-up
of a host name, or a clean-up that waits for ever, would make the command deaf. So a thread of its own reads the signals
from a pipe, into which C code writes them (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from jzero.errors import ConfigError

LAST = 8.0  # seconds after the grace until the command ends, whatever it does; its agents then kill their processes


class Signals:
    """Pass SIGINT, SIGTERM and SIGHUP to the event loop, and end this process once the grace is over.

    Args:
      grace: seconds from the first signal on; a second signal ends it.
    """

    def __init__(self, grace: float):
        self._grace, self._seen = grace, 0
        self._deliver: Callable[[int], object] | None = None

    def to(self, handler: Callable[[int], None]) -> None:
        """Call `handler(number)` in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        self._deliver = lambda number: loop.call_soon_threadsafe(handler, number)

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write)
        caught = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
        # nohup ignores SIGHUP; keep it so
        self._before = {number: signal.signal(number, lambda *_: None) for number in caught}
        threading.Thread(target=self._watch, daemon=True, name="jzero signals").start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)

    def _watch(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number in self._before:
                    self._received(number)
        os.close(self._read)

    def _received(self, number: int) -> None:
        self._seen += 1
        if self._deliver is None:  # nothing has been started yet
            os._exit(128 + number)
        last = threading.Timer(LAST + (self._grace if self._seen == 1 else 0), self._end, (number,))
        last.daemon = True
        last.start()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._deliver(number)

    def _end(self, number: int) -> None:
        print("jzero: the command itself was stuck; it ends now", file=sys.stderr, flush=True)
        os._exit(128 + number)


def run(main: Callable[[Signals], Coroutine[Any, Any, int]], grace: float) -> int:
    """Run `main(signals)` to its end and return its exit code; 1 after an exception that nobody expected.

    Raises:
      ConfigError: raised by `main`.
    """
    with Signals(grace) as signals:
        try:
            return asyncio.run(main(signals))
        except ConfigError:
            raise
        except Exception as error:
            print(f"jzero: {unexpected(error)}", file=sys.stderr, flush=True)
            return 1


def unexpected(error: BaseException) -> str:
    """Describe an exception that nobody expected: its type, its text, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({os.path.basename(frame.filename)}, line {frame.lineno})" for frame in last)
    return f"the command itself failed: {type(error).__name__}: {error}{where}; please report it"
