"""Notices that a draft was deleted or unmounted while it was written.

The path alone does not show it: TensorStore makes missing directories again, and the checkpoint would be complete but
for the files that were already in the deleted one.
"""

from __future__ import annotations

import os
from pathlib import Path


class Presence:
    """A draft that exists now, and that will be renamed to the checkpoint `path`.

    Raises:
      OSError: it does not exist.
    """

    def __init__(self, draft: Path, path: Path):
        self.draft, self.path = draft, path
        # An open directory keeps its number, which the file system would otherwise give to a new one.
        try:
            self._descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise vanished(draft) from None

    def check(self) -> None:
        """Raise an OSError if neither path is the directory any more."""
        if not self._is_at(self.draft) and not self._is_at(self.path):
            raise vanished(self.draft)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:  # no such directory; NFS: a stale handle
            return False

    def close(self) -> None:
        os.close(self._descriptor)


def vanished(draft: Path) -> OSError:
    """Make the error that names the missing directory: the draft, or the one that it was in."""
    missing = draft if draft.parent.exists() else draft.parent
    return OSError(f"{missing} vanished during the save: it was deleted or unmounted")
