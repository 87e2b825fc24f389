"""Files that no link redirects, and the directory of what jzero keeps between runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Any


def create(path: str | os.PathLike[str], kind: str = "w", mode: int = 0o666) -> IO[Any]:
    """Make an empty file and open it for writing; whatever has its name is removed.

    A link at that name would lead the write to another file, and a fifo would block it. Removing a name follows no
    link, and O_EXCL refuses what appears after that.

    Args:
      kind: "w" for text, "wb" for bytes.
      mode: before the umask.

    Raises:
      OSError: it cannot be removed (another user's in /tmp, a directory) or made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, mode), kind)


def kept(name: str) -> Path:
    """Return the directory of this user's files of one kind that make the next run faster; does not create it.

    Args:
      name: as "plans", in $XDG_CACHE_HOME/jzero or ~/.cache/jzero.

    Raises:
      RuntimeError: the home directory is unknown.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jzero" / name
