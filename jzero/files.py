"""Files that no link redirects, directories that can be written, and that of what jzero keeps between runs."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

from jzero.errors import ConfigError

ROOM = 400  # bytes of a path below a directory, for a tag and its files
# Errors of a file system that another start does not change; others, as of a network, may pass.
_LASTING = {
    errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


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


def append(path: str | os.PathLike[str]) -> int:
    """Open a file to add to it, and return its descriptor; it is made if there is none.

    Raises:
      OSError: it is a link, which would lead elsewhere, or a fifo, which would block, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def read_file(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """Return the contents of a file, or its first bytes.

    Raises:
      OSError: it cannot be read, or is a fifo, which would block, or a device.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return file.read(most)


def lasts(error: OSError) -> bool:
    """Return whether another start would raise the same error."""
    return error.errno in _LASTING


def check_writable(path: Path, key: str) -> None:
    """Raise a ConfigError unless files can be written into a directory, which need not exist yet.

    Raises:
      OSError: the file system has failed, which may pass.
    """

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"{key} = {str(path)!r}: {problem}; name a directory that can be written")

    mode = 0
    for there in (path, *path.parents):
        try:
            mode = os.stat(there).st_mode
            break
        except FileNotFoundError:
            if os.path.islink(there):
                raise refuse(f"{there} is a link to {os.readlink(there)}, which does not exist") from None
        except NotADirectoryError:  # its parent is a file, and the next to look at
            pass
        except OSError as error:
            if not lasts(error):
                raise
            raise refuse(f"{there}: {error.strerror}") from None
    allowed = os.access(there, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    if not stat.S_ISDIR(mode) or not allowed:
        raise refuse(f"{there} is not a writable directory")
    longest = max((len(os.fsencode(name)) for name in path.relative_to(there).parts), default=0)
    if longest > os.pathconf(there, "PC_NAME_MAX") or len(os.fsencode(path)) + ROOM > os.pathconf(there, "PC_PATH_MAX"):
        raise refuse("File name too long")


def cache_directory(name: str) -> Path:
    """Return the directory of this user's files of one kind that make the next run faster; does not create it.

    Args:
      name: as "plans", in $XDG_CACHE_HOME/jzero or ~/.cache/jzero.

    Raises:
      RuntimeError: the home directory is unknown.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jzero" / name
