"""Appends records to a file from a thread, so that no disk delays a step, nor what shows it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jzero.files import append
from jzero.values.json_lines import encode

CLOSE_TIMEOUT = 10.0  # seconds to wait at the end for saves
POLL = 0.05  # seconds between two looks at a running save
_open: weakref.WeakValueDictionary[Path, RecordWriter] = weakref.WeakValueDictionary()  # the writers of this process


class Later(NamedTuple):
    """A record that is not known yet: `make` may be called once `is_ready` returns True."""

    is_ready: Callable[[], bool]
    make: Callable[[], dict[str, Any]]


class RecordWriter:
    """A file that only grows, a line per record; each line is one `write`, so that a kill tears at most the last.

    Records are written in their order, except for saves, which take long and must not delay the steps after them.

    Raises:
      OSError: the file cannot be opened. A later error ends the writing with a warning.
    """

    def __init__(self, path: Path, before: Callable[[float], None] = lambda seconds: None):
        """Open the file.

        Args:
          before: waits a number of seconds for what will be written, and is not with this writer yet.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._path, self._before = append(path), path, before
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a kill tore the last line
            os.write(self._file, b"\n")
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._saves = list[Later]()
        self._failed, self._warned, self._deadline = False, False, float("inf")
        self._thread = threading.Thread(target=self._run, name="jzero ledger", daemon=True)
        self._thread.start()
        _open[path.absolute()] = self

    def put(self, record: dict[str, Any]) -> None:
        """Write a record after those before it."""
        self._queue.put(lambda: self._write(lambda: record))

    def put_save(self, save: Later) -> None:
        """Write a record once it is ready, and let the disk confirm it and all before."""
        self._queue.put(lambda: self._saves.append(save))

    def settle(self, seconds: float = 1.0) -> None:
        """Wait until everything before this call is written, for a limited time."""
        self._before(seconds)
        done = threading.Event()

        def finish() -> None:
            self._flush()
            done.set()

        self._queue.put(finish)
        done.wait(seconds)

    def close(self) -> None:
        """Write what is known within `CLOSE_TIMEOUT` seconds, and close the file."""
        self._deadline = time.monotonic() + CLOSE_TIMEOUT
        self._queue.put(None)
        if self._thread is not threading.current_thread():  # which may be the one that collects an engine
            self._thread.join(2 * CLOSE_TIMEOUT)

    def _run(self) -> None:
        ending = False
        while not (ending and (not self._saves or time.monotonic() > self._deadline)):
            with contextlib.suppress(queue.Empty):
                work = self._queue.get(timeout=POLL if self._saves else None)
                ending = ending or work is None
                if work is not None:
                    work()
            self._flush()
        os.close(self._file)

    def _flush(self) -> None:
        """Write the saves that have ended."""
        for save in [save for save in self._saves if save.is_ready()]:
            self._saves.remove(save)
            self._write(save.make, sync=True)

    def _write(self, make: Callable[[], dict[str, Any]], sync: bool = False) -> None:
        try:
            line = encode(make()).encode()
        except BaseException as error:  # must not end the thread
            if not self._warned:
                self._warned = True
                warnings.warn(f"{self._path}: a record is lost: {type(error).__name__}: {error}", RuntimeWarning, 2)
            return
        if self._failed:
            return
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("no space for a whole line")
            if sync:
                os.fsync(self._file)
        except OSError as error:
            self._failed = True
            warnings.warn(f"{self._path}: no more records from this run: {error}", RuntimeWarning, 2)


def wait_for_appends(path: Path) -> None:
    """Wait until a file that this process appends to contains what has happened, so that a notebook can read it."""
    if writer := _open.get(path.absolute()):
        writer.settle()
