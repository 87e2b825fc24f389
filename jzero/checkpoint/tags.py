"""Tags of checkpoints, and the file DIR/latest that contains the last one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LATEST = "latest"
SAVING, REPLACED = ".saving", ".replaced"
DEFAULT_TAG = "global_step{}"  # DeepSpeed's
LONGEST = 255 - len(REPLACED)  # bytes: a file system's limit for a name


def is_tag(text: str) -> bool:
    """Return whether a text is a valid tag: one line, one directory name, and no name that jzero uses itself."""
    fits = text.isprintable() and len(text.encode(errors="replace")) <= LONGEST
    return fits and Path(text).name == text and not text.endswith((SAVING, REPLACED)) and text not in ("", "..", LATEST)


def read_latest(directory: Path) -> tuple[str | None, str]:
    """Read DIR/latest: (its tag, ""), or (None, why there is none)."""
    try:
        descriptor = os.open(directory / LATEST, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of this name would block
    except (FileNotFoundError, NotADirectoryError):
        return None, f"it has no file {LATEST!r}"
    except OSError as error:
        return None, f"its file {LATEST!r} cannot be read: {error.strerror}"
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None, f"its {LATEST!r} is not a file"
        text = os.read(descriptor, 10_000).decode(errors="surrogateescape").strip()
    except OSError as error:
        return None, f"its file {LATEST!r} cannot be read: {error.strerror}"
    finally:
        os.close(descriptor)
    if not text:
        return None, f"its file {LATEST!r} is empty"
    return (text, "") if is_tag(text) else (None, f"its file {LATEST!r} is damaged: it contains {ascii(text)[:60]}")
