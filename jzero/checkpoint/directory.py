"""A directory of checkpoints, and how one comes to be in it whole or not at all.

DIR/latest            the tag of the last save
DIR/TAG/state/        the arrays, as Orbax writes them
DIR/TAG/notes.json    everything else, with a checksum of itself
DIR/TAG.saving/       one that is being written, or what a killed job left of it
DIR/TAG.replaced/     the former one of a tag that is being saved again
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import re
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

from jzero.errors import CheckpointError, ConfigError

LATEST, STATE, NOTES = "latest", "state", "notes.json"
SAVING, REPLACED = ".saving", ".replaced"
DEFAULT_TAG = "global_step{}"  # DeepSpeed's


def place(directory: str | os.PathLike | None, tag: str | float) -> Path:
    """Where a tag's checkpoint lies. A number is a tag too, as in DeepSpeed.

    Raises:
      ConfigError: no directory, or a tag that is no name.
    """
    if not directory or not isinstance(directory, str | os.PathLike):
        raise ConfigError(f"the directory for checkpoints is {directory!r}: give one, or checkpoint.dir in the config")
    root = local(directory, "the directory for checkpoints")
    reserved = ("", ".", "..", LATEST)
    if isinstance(tag, numbers.Real):
        tag = str(tag)
    if not isinstance(tag, str) or Path(tag).name != tag or tag.endswith((SAVING, REPLACED)) or tag in reserved:
        raise ConfigError(
            f"tag = {tag!r}: must be a number or a name without separators, neither {LATEST!r} nor with the ending "
            f"{SAVING!r} or {REPLACED!r}"
        )
    return root / tag


def local(directory: str | os.PathLike, key: str) -> Path:
    """The directory's absolute path; a ConfigError for an address as gs://bucket."""
    if re.match(r"\w+:/", str(directory)):
        raise ConfigError(
            f"{key} = {str(directory)!r}: must be a directory of a file system that all hosts see; mount the bucket"
        )
    return Path(directory).absolute()


def draft_of(path: Path) -> Path:
    """Where the checkpoint `path` is written before it is complete."""
    return path.with_name(path.name + SAVING)


def former_of(path: Path) -> Path:
    """Where the tag's former checkpoint lies while a new one takes its place."""
    return path.with_name(path.name + REPLACED)


def find(directory: str | os.PathLike | None, tag: str | float | None = None) -> Path:
    """The checkpoint of that tag, or the one that directory/latest names.

    Raises:
      ConfigError: there is none.
    """
    path = place(directory, "any" if tag is None else tag)
    root = path.parent
    if tag is None:
        named = latest(root)
        if named is None:
            what = "nothing in its file" if (root / LATEST).exists() else "no file"
            raise ConfigError(f"{root} holds no checkpoint to take by default ({what} {LATEST!r}): {_hint(root)}")
        path = named
    if not path.is_dir() and _ours(former_of(path)):
        return former_of(path)  # a kill between two renames left it, or a save is between them now
    if not path.is_dir():
        raise ConfigError(f"checkpoint {path} does not exist: {_hint(root)}")
    return path


def _hint(root: Path) -> str:
    if _is_checkpoint(root):
        return f"it is a checkpoint itself; give the directory {root.parent}, and the tag {root.name!r}"
    tags = [path.name for path, _ in complete(root)]
    return f"choose a tag: {', '.join(tags)}" if tags else "give save_checkpoint's directory"


def check_home(directory: str | os.PathLike, key: str) -> None:
    """Raise a ConfigError if checkpoints cannot be written there: better before the first step than after hours."""
    root = local(directory, key)
    if _is_checkpoint(root):
        raise ConfigError(f"{key} = {str(directory)!r}: is a checkpoint itself; give its directory, {root.parent}")
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{key} = {str(directory)!r}: {there} is no directory that can be written to; name one")


def recover(root: Path) -> None:
    """Finish what a kill between two renames left: a tag's former checkpoint without the new one."""
    for former in filter(_ours, root.glob(f"*{REPLACED}")):
        path = former.with_name(former.name.removesuffix(REPLACED))
        if path.exists():
            shutil.rmtree(former, ignore_errors=True)
        else:
            os.replace(former, path)


def begin(path: Path) -> None:
    """Make room for a new draft; what killed jobs left of theirs goes.

    Raises:
      ConfigError: where the checkpoint should lie, something else does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path.parent)
    for there in (path, draft_of(path), former_of(path)):
        if there.exists() and not _ours(there):
            raise ConfigError(f"{there} is there, and no checkpoint of jzero's: choose another directory, or tag=")
    for left in filter(_ours, path.parent.glob(f"*{SAVING}")):
        shutil.rmtree(left)
    (draft_of(path) / STATE).mkdir(parents=True)


def _ours(path: Path) -> bool:
    """Whether that is a checkpoint, whole or in part: no other directory, and no link, is ever moved or removed."""
    if path.is_symlink():
        return False
    with contextlib.suppress(OSError):
        parts = {part.name for part in path.iterdir()}
        nothing_else = parts <= {STATE, NOTES, NOTES + ".new"}
        return (nothing_else and (STATE in parts or NOTES not in parts)) or _unsealed(path) is not None
    return False


def _is_checkpoint(path: Path) -> bool:
    return (path / NOTES).exists() and (path / STATE).is_dir()


def commit(path: Path, notes: dict[str, Any], names_latest: bool, max_to_keep: int | None) -> None:
    """Make the draft the checkpoint: from one rename on it is there.

    Raises:
      OSError: with a text that says whether it is there.
    """
    before = [about["saved"] for _, about in complete(path.parent) if not isinstance(about, CheckpointError)]
    saved = max([time.time(), *(1e-3 + other for other in before)])  # though another host's clock was ahead
    write(draft_of(path) / NOTES, _seal({"saved": saved} | notes))
    former = former_of(path)
    if path.exists():
        shutil.rmtree(former, ignore_errors=True)
        os.replace(path, former)
    os.replace(draft_of(path), path)
    shutil.rmtree(former, ignore_errors=True)
    try:
        if names_latest:
            write(path.parent / LATEST, path.name)
    except OSError as error:
        raise OSError(f"it is complete, but {path.parent / LATEST} cannot be written: {error.strerror}") from None
    if max_to_keep and (number := _number(path)) is not None:
        keep = [path, latest(path.parent)]
        for old in _up_to(path.parent, number)[max_to_keep:]:
            if old not in keep and _ours(old):
                with contextlib.suppress(OSError):
                    os.replace(old, draft_of(old))  # or a kill would leave half of it
                    shutil.rmtree(draft_of(old))


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = file.with_name(file.name + ".new")
    with new.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)


def _number(path: Path) -> int | None:
    """The step in a default tag. Other checkpoints the user named, and they are the user's to remove."""
    match = re.fullmatch(DEFAULT_TAG.format(r"(\d+)"), path.name)
    return int(match[1]) if match else None


def _up_to(directory: Path, step: int) -> list[Path]:
    """The checkpoints with default tags, the last saved first, what cannot be read last.

    Those of later steps are another run's, in whose directory this one began from scratch: not this one's to remove.
    """
    found = [(path, notes) for path, notes in complete(directory) if (n := _number(path)) is not None and n <= step]
    return [path for path, _ in sorted(found, key=lambda one: isinstance(one[1], CheckpointError))]


def complete(directory: Path) -> list[tuple[Path, dict[str, Any] | CheckpointError]]:
    """Every checkpoint in a directory with its notes, or why they cannot be read; the last saved first."""
    found: list[tuple[float, Path, Any]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        try:
            if path.name.endswith((SAVING, REPLACED)) or not ((path / STATE).is_dir() or (path / NOTES).exists()):
                continue
            notes = read_notes(path)
            found.append((notes["saved"], path, notes))
        except CheckpointError as error:
            found.append((_changed(path), path, error))
        except OSError as error:  # some other directory, as lost+found; or a checkpoint of another user's
            if _number(path) is not None:
                found.append((_changed(path), path, CheckpointError(f"checkpoint {path}: {error.strerror}")))
    return [(path, notes) for _, path, notes in sorted(found, key=lambda one: one[0], reverse=True)]


def _changed(path: Path) -> float:
    """When; 0 if it has gone, as another job may just have removed it."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def latest(directory: Path) -> Path | None:
    """The checkpoint that DIR/latest names; None without that file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if tag := (directory / LATEST).read_text(errors="replace").strip():
            return directory / tag
    return None


def read_notes(path: Path) -> dict[str, Any]:
    """A checkpoint's notes.

    Raises:
      CheckpointError: they are missing or damaged, so the checkpoint is.
    """
    if path.is_dir() and not (path / STATE).is_dir():
        raise CheckpointError(f"checkpoint {path} is not complete: it has no {STATE}")
    try:
        notes = _unsealed(path)
    except OSError as error:
        what = f"is not complete: {NOTES}: {error.strerror}" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}") from None
    if notes is None:
        raise CheckpointError(f"checkpoint {path} is damaged: {NOTES} is not what was written")
    return notes


def _unsealed(path: Path) -> dict[str, Any] | None:
    """What the notes say; None if they are not what was written."""
    text = (path / NOTES).read_text(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        notes = json.loads(text)["notes"]
        return notes if _seal(notes) == text else None
    return None


def _seal(notes: dict[str, Any]) -> str:
    text = json.dumps(notes)
    return json.dumps({"crc32": zlib.crc32(text.encode()), "notes": notes}) + "\n"
