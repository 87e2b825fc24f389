"""The directory layout of checkpoints, and the order of writes that makes each one complete or absent.

DIR/latest            the tag of the last save
DIR/.lock             the job that writes here (lock.py)
DIR/TAG/state/        the arrays, in Orbax's format
DIR/TAG/notes.json    everything else, with a checksum of itself
DIR/TAG.saving/       a draft: being written, or left by a killed job
DIR/TAG.replaced/     the previous checkpoint of a tag that is being saved again

A save writes the arrays into the draft, then `commit` runs on process 0:

1. notes.json goes into the draft last, so a draft without it is never taken for a checkpoint.
2. If the tag exists, it is renamed to TAG.replaced. A directory cannot be renamed onto one that is not empty.
3. The draft is renamed to TAG. From here on the new checkpoint exists.
4. TAG.replaced is deleted, `latest` is rewritten, old checkpoints are deleted.

A kill between 2 and 3 leaves only TAG.replaced: `find_checkpoint` then reads it, and the next save renames it back
(`recover`). `latest` is written after 3, so it never names a checkpoint that was not complete.

jzero never replaces or deletes a directory that it did not write.
"""

from __future__ import annotations

import contextlib
import errno
import json
import numbers
import os
import re
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

from jzero.checkpoint.lock import LOCK
from jzero.errors import CheckpointError, ConfigError, some_of
from jzero.files import check_writable, create, read_file

STATE, NOTES = "state", "notes.json"
LATEST = "latest"
SAVING, REPLACED = ".saving", ".replaced"
DEFAULT_TAG = "global_step{}"  # DeepSpeed's
LONGEST = 255 - len(REPLACED)  # bytes: a file system's limit for a name
OWN = (LATEST, f"{LATEST}.new", LOCK, "ledger.jsonl")  # files among the checkpoints
LATEST_TIME = 1e11  # seconds since 1970; a save at a later time would stay the newest for ever


def checkpoint_path(directory: str | os.PathLike | None, tag: str | float) -> Path:
    """Return the path of a tag's checkpoint. A tag may be a number, as in DeepSpeed.

    Raises:
      ConfigError: no directory, or a tag that is not a valid name.
    """
    if not directory or not isinstance(directory, str | os.PathLike):
        raise ConfigError(f"the checkpoint directory is {directory!r}: pass one, or set checkpoint.dir in the config")
    root = local_path(directory, "the checkpoint directory")
    if isinstance(tag, numbers.Real):
        tag = str(tag)
    if not isinstance(tag, str) or not is_tag(tag):
        raise ConfigError(
            f"tag = {ascii(tag)[:80]}: must be a number or a printable name of at most {LONGEST} bytes, without "
            f"separators and without a space at either end; {', '.join(OWN)} and names that end with {SAVING} or "
            f"{REPLACED} are reserved"
        )
    return root / tag


def is_tag(text: str) -> bool:
    """Return whether a text is a valid tag: one line, one directory name, and no name that jzero uses itself."""
    fits = text.isprintable() and len(text.encode(errors="replace")) <= LONGEST and text == text.strip()
    is_name = Path(text).name == text and text not in ("", "..")
    ours = text in OWN or text.startswith(LOCK) or text.endswith((SAVING, REPLACED))
    return fits and is_name and not ours


def read_latest(directory: Path, file: str = LATEST) -> tuple[str | None, str]:
    """Read DIR/latest, or another file: (its tag, ""), or (None, why there is none)."""
    try:
        text = read_file(directory / file, 10_000).decode(errors="surrogateescape").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None, f"it has no file {file!r}"
    except OSError as error:
        is_none = error.errno in (errno.EINVAL, errno.EISDIR)
        return (
            None,
            f"its {file!r} is not a file" if is_none else f"its file {file!r} cannot be read: {error.strerror}",
        )
    if not text:
        return None, f"its file {file!r} is empty"
    return (text, "") if is_tag(text) else (None, f"its file {file!r} is damaged: it contains {ascii(text)[:60]}")


def local_path(directory: str | os.PathLike, key: str) -> Path:
    """Return the directory's absolute path, with ~ expanded; raise a ConfigError for a URL such as gs://bucket."""
    if re.match(r"\w+:/", str(directory)):
        raise ConfigError(
            f"{key} = {str(directory)!r}: must be a directory on a file system that all hosts share; mount the bucket"
        )
    try:
        path = Path(directory).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{key} = {str(directory)!r}: there is no such user; write the path without ~") from None
    if "\0" in str(path):
        raise ConfigError(f"{key} = {ascii(str(directory))[:80]}: contains a NUL byte")
    return path


def draft_path(path: Path) -> Path:
    """Return the directory in which the checkpoint `path` is written until it is complete."""
    return path.with_name(path.name + SAVING)


def replaced_path(path: Path) -> Path:
    """Return the directory that stores the tag's previous checkpoint while a new one replaces it."""
    return path.with_name(path.name + REPLACED)


def find_checkpoint(directory: str | os.PathLike | None, tag: str | float | None = None) -> Path:
    """Find the checkpoint of a tag; without a tag, the one that directory/latest names.

    Raises:
      ConfigError: it does not exist.
    """
    path = checkpoint_path(directory, "any" if tag is None else tag)
    root = path.parent
    if not root.exists():
        raise ConfigError(
            f"{root}: no such directory: pass the one that was given to save_checkpoint; engine.load_weights reads a "
            "download of Hugging Face"
        )
    if tag is None:
        named, problem = read_latest(root)
        if named is None:
            raise ConfigError(f"{root} has no default checkpoint ({problem}): {_hint(root)}")
        path = root / named
    if not path.is_dir() and _written_by_jzero(replaced_path(path)):
        return replaced_path(path)  # a job was killed between the two renames, or a save is between them now
    if not path.is_dir():
        raise ConfigError(f"checkpoint {path} does not exist: {_hint(root)}")
    return path


def _hint(root: Path) -> str:
    if _is_checkpoint(root):
        return f"it is itself a checkpoint; pass the directory {root.parent} and the tag {root.name!r}"
    tags = [path.name for path, _ in list_checkpoints(root)]
    return f"choose a tag: {some_of(tags)}" if tags else "pass the directory that was given to save_checkpoint"


def check_home(directory: str | os.PathLike, key: str) -> None:
    """Raise a ConfigError if checkpoints cannot be written there: before the first step rather than after hours."""
    root = local_path(directory, key)
    check_writable(root, key)
    if _is_checkpoint(root):
        raise ConfigError(f"{key} = {str(directory)!r}: is itself a checkpoint; use its parent, {root.parent}")


def recover(root: Path) -> None:
    """Undo or finish the renames of a save that was killed between them."""
    for replaced in filter(_written_by_jzero, root.glob(f"*{REPLACED}")):
        path = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(replaced, path)


def begin_draft(path: Path) -> None:
    """Make an empty draft for the checkpoint `path`; delete the drafts of killed jobs.

    Raises:
      ConfigError: a directory that jzero did not write is in the way.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path.parent)
    for there in (path, draft_path(path), replaced_path(path)):
        if there.exists() and not _written_by_jzero(there):
            raise ConfigError(f"{there} exists and is not a jzero checkpoint: choose another directory or tag=")
    for abandoned in filter(_written_by_jzero, path.parent.glob(f"*{SAVING}")):
        shutil.rmtree(abandoned)
    (draft_path(path) / STATE).mkdir(parents=True)


def _written_by_jzero(path: Path) -> bool:
    """Return whether the directory is a jzero checkpoint, complete or not: jzero never moves or deletes any other.

    A symbolic link is not, because its target may belong to another run.
    """
    if path.is_symlink():
        return False
    with contextlib.suppress(OSError):
        parts = {part.name for part in path.iterdir()}
        nothing_else = parts <= {STATE, NOTES, NOTES + ".new"}
        return (nothing_else and (STATE in parts or NOTES not in parts)) or _unseal(path) is not None
    return False


def _is_checkpoint(path: Path) -> bool:
    return (path / NOTES).exists() and (path / STATE).is_dir()


def commit(path: Path, notes: dict[str, Any], names_latest: bool, max_to_keep: int | None) -> None:
    """Turn the draft into the checkpoint, in the order that the module's docstring explains.

    Raises:
      OSError: a step failed; the message reports whether the checkpoint is complete nevertheless.
    """
    others = list_checkpoints(path.parent)
    before = [other["saved"] for _, other in others if not isinstance(other, CheckpointError)]
    # Newer than every other save, even if the clock of the host that wrote one was ahead: the times order checkpoints.
    saved = max([time.time(), *(1e-3 + other for other in before)])
    write_atomically(draft_path(path) / NOTES, _seal({"saved": saved} | notes))
    replaced = replaced_path(path)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(path, replaced)
    os.replace(draft_path(path), path)
    shutil.rmtree(replaced, ignore_errors=True)
    try:
        if names_latest:
            write_atomically(path.parent / LATEST, path.name)
    except OSError as error:
        raise OSError(
            f"its files are complete, but {path.parent / LATEST} cannot be written: {error.strerror}"
        ) from None
    if max_to_keep and (number := _number(path)) is not None:
        keep = [path.name, read_latest(path.parent)[0]]
        for old in _prunable(path.parent, number)[max_to_keep:]:
            if old.name not in keep and _written_by_jzero(old):
                with contextlib.suppress(OSError):
                    os.replace(old, draft_path(old))  # a kill during rmtree then leaves a draft, not half a checkpoint
                    shutil.rmtree(draft_path(old))


def write_atomically(file: Path, text: str) -> None:
    """Write a file completely or not at all.

    The fsync comes before the rename: after a power failure a rename may have reached the disk before the contents.
    """
    new = file.with_name(file.name + ".new")
    with create(new) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)


def _number(path: Path) -> int | None:
    """Parse the step from a default tag; None for a tag that the user chose, which jzero never deletes."""
    match = re.fullmatch(DEFAULT_TAG.format(r"(\d+)"), path.name)
    return int(match[1]) if match else None


def _prunable(directory: Path, step: int) -> list[Path]:
    """List the checkpoints with default tags up to `step`: the last saved first, unreadable ones last.

    Checkpoints of later steps stay: they belong to an earlier run in the same directory.
    """
    found = [
        (path, notes) for path, notes in list_checkpoints(directory) if (n := _number(path)) is not None and n <= step
    ]
    return [path for path, _ in sorted(found, key=lambda one: isinstance(one[1], CheckpointError))]


def list_checkpoints(directory: Path) -> list[tuple[Path, dict[str, Any] | CheckpointError]]:
    """List the checkpoints in a directory, the last saved first, each with its notes or the error in reading them."""
    found: list[tuple[float, Path, Any]] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        try:
            if path.name.endswith((SAVING, REPLACED)) or not ((path / STATE).is_dir() or (path / NOTES).exists()):
                continue
            notes = read_notes(path)
            found.append((notes["saved"], path, notes))
        except CheckpointError as error:
            found.append((_modified(path), path, error))
        except OSError as error:  # not a checkpoint, as lost+found, or a checkpoint that another user's umask hides
            if _number(path) is not None:
                found.append((_modified(path), path, CheckpointError(f"checkpoint {path}: {error.strerror}")))
    return [(path, notes) for _, path, notes in sorted(found, key=lambda one: one[0], reverse=True)]


def _modified(path: Path) -> float:
    """Return the modification time; 0 if another job has just deleted the directory."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_notes(path: Path) -> dict[str, Any]:
    """Read a checkpoint's notes.

    Raises:
      CheckpointError: the checkpoint is incomplete or damaged, or does not exist.
    """
    if path.is_dir() and not (path / STATE).is_dir():
        raise CheckpointError(f"checkpoint {path} is not complete: it has no {STATE}")
    try:
        notes = _unseal(path)
    except OSError as error:
        reason = f"is not complete: {NOTES}: {error.strerror}" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {reason}") from None
    if notes is None:
        raise CheckpointError(f"checkpoint {path} is damaged: {NOTES} does not match its checksum")
    if not _are_notes(notes):
        raise CheckpointError(f"checkpoint {path} is damaged: {NOTES} has other contents than jzero writes")
    return notes


def _are_notes(x: Any) -> bool:
    """Return whether an object has what every reader of notes relies on; a checksum is no signature."""

    def is_leaf(entry: Any) -> bool:
        if not isinstance(entry, list) or list(map(type, entry)) != [str, list, int]:
            return False
        return all(type(n) is int and n >= 0 for n in entry[1])

    if not isinstance(x, dict) or type(x.get("saved")) is not float or not 0 < x["saved"] < LATEST_TIME:
        return False
    if not all(isinstance(x.get(part), dict) for part in ("leaves", "without", "keys", "notes")):
        return False
    return all(map(is_leaf, (x["leaves"] | x["without"]).values()))


def _unseal(path: Path) -> dict[str, Any] | None:
    """Read the notes; None if they do not match their checksum."""
    text = read_file(path / NOTES).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        notes = json.loads(text)["notes"]
        return notes if _seal(notes) == text else None
    return None


def _seal(notes: dict[str, Any]) -> str:
    """Return the text of notes.json: the notes and their checksum."""
    text = json.dumps(notes)
    return json.dumps({"crc32": zlib.crc32(text.encode()), "notes": notes}) + "\n"
