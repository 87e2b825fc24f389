"""The file of `--save_pid`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jzero.errors import ConfigError
from jzero.files import create


@contextlib.contextmanager
def pid_file(wanted: bool) -> Iterator[None]:
    """Keep this command's pid in `/tmp/PID.jzero` while it runs.

    Raises:
      ConfigError: the file cannot be written.
    """
    # A name that others can guess, so that a script finds it; `create` follows no link that waits there.
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"{os.getpid()}.jzero")  # noqa: S108
    if wanted:
        try:
            with create(path) as file:
                file.write(f"{os.getpid()}\n")
        except OSError as error:
            raise ConfigError(f"--save_pid: {path}: {error.strerror}: remove it, or set TMPDIR") from None
    try:
        yield
    finally:
        if wanted:
            path.unlink(missing_ok=True)
