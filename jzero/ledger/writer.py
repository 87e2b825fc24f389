"""Appends records to a file from a thread, each once it is known, so that neither devices nor disks delay a step."""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jzero.values.json_lines import encode

LAST = 10.0  # seconds to wait at the end for the last step; after the death of a peer it never comes
POLL = 0.001, 0.05  # seconds between two looks at what is not ready: 5% of the wait so far, within these bounds
_END: Any = object()

_open: weakref.WeakValueDictionary[Path, Writer] = weakref.WeakValueDictionary()  # the writers of this process


class Entry(NamedTuple):
    """A record that is not known yet: `make` may be called once `is_ready` returns True; None: there is no record."""

    is_ready: Callable[[], bool]
    make: Callable[[], dict[str, Any] | None]


class Writer:
    """A file that only grows, a line per record; each line is one `write`, so that a kill tears at most the last.

    Entries are written in their order, except for saves, which take long and must not delay the steps after them.

    Raises:
      OSError: the file cannot be opened. A later error ends the writing with a warning.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # No link leads elsewhere, and a fifo is an error instead of a wait.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._file, self._path = os.open(path, flags, 0o666), path
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a kill tore the last line
            os.write(self._file, b"\n")
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._entries, self._saves = deque[Entry](), list[Entry]()
        self._failed, self._warned, self._deadline = False, False, float("inf")
        self._thread = threading.Thread(target=self._run, name="jzero ledger", daemon=True)
        self._thread.start()
        _open[path.absolute()] = self

    def put(self, entry: Entry) -> None:
        """Write a record after those before it."""
        self._queue.put((self._entries, entry))

    def put_save(self, entry: Entry) -> None:
        """Write a record once it is ready, and let the disk confirm it and all before."""
        self._queue.put((self._saves, entry))

    def settle(self, seconds: float = 1.0) -> None:
        """Wait until everything before this call is written, for a limited time."""
        done = threading.Event()

        self.put(Entry(lambda: True, done.set))
        done.wait(seconds)

    def close(self) -> None:
        """Write what is known within `LAST` seconds, and close the file."""
        self._deadline = time.monotonic() + LAST
        self._queue.put(_END)
        self._thread.join(2 * LAST)

    def _run(self) -> None:
        ending, since = False, time.monotonic()
        while not (ending and (not (self._entries or self._saves) or time.monotonic() > self._deadline)):
            waited = time.monotonic() - since
            pause = min(POLL[1], max(POLL[0], waited / 20)) if self._entries or self._saves else None
            try:
                item = self._queue.get(timeout=pause)
                ending = ending or item is _END
                if item is not _END:
                    item[0].append(item[1])
            except queue.Empty:
                pass
            if self._flush():
                since = time.monotonic()
        os.close(self._file)

    def _flush(self) -> bool:
        """Write what is ready; return whether anything was."""
        before = len(self._entries) + len(self._saves)
        for save in [save for save in self._saves if _is_ready(save)]:
            self._saves.remove(save)
            self._write(save, sync=True)
        while self._entries and _is_ready(self._entries[0]):
            self._write(self._entries.popleft())
        return before > len(self._entries) + len(self._saves)

    def _write(self, entry: Entry, sync: bool = False) -> None:
        try:
            record = entry.make()
            line = b"" if record is None else encode(record).encode()
        except RuntimeError:  # the step failed on the devices, and the script gets its error; or its arrays are deleted
            return
        except Exception as error:  # must not end the thread
            if not self._warned:
                self._warned = True
                warnings.warn(f"{self._path}: a record is lost: {type(error).__name__}: {error}", RuntimeWarning, 2)
            return
        if self._failed or not line:
            return
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("no space for a whole line")
            if sync:
                os.fsync(self._file)
        except OSError as error:
            self._failed = True
            warnings.warn(f"{self._path}: no more records from this run: {error}", RuntimeWarning, 2)


def _is_ready(entry: Entry) -> bool:
    try:
        return entry.is_ready()
    except RuntimeError:  # such as of a lost backend; `make` raises it too
        return True


def settle(path: Path) -> None:
    """Wait until a file that this process appends to contains what has happened, so that a notebook can read it."""
    if writer := _open.get(path.absolute()):
        writer.settle()
