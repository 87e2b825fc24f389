"""Saving: a snapshot now, the files from a thread while training goes on."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jzero.checkpoint.directory import DEFAULT_TAG, STATE, begin, commit, draft_of, place
from jzero.checkpoint.late import drop_late_answers
from jzero.checkpoint.leaves import has_room, key_names, nest, snapshot, to_host
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import agree, anyone
from jzero.errors import CheckpointError, ConfigError, in_a_line
from jzero.tree import named

TIMEOUT = 1800.0  # seconds in which all processes have to call save
CHUNK = 64 * 2**20  # bytes: what a reader of a part of a leaf has to hold at least

_last: Save | None = None


class Save:
    """A save under way, or its end.

    Attributes:
      path: the checkpoint's.
      error: why it failed; None if it did not, or is not done.
    """

    def __init__(self, path: Path):
        self.path, self.reported = path, False
        self.error: str | None = None
        self.thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()

    def __repr__(self) -> str:
        return f"Save({str(self.path)!r}, {'failed' if self.error else 'complete' if self.done else 'being written'})"

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; its path.

        Raises:
          CheckpointError: it could not be written. On all processes.
        """
        assert self.thread is not None
        self.thread.join()
        if self.error:
            self.reported = True
            raise CheckpointError(self.error)
        return self.path


def settle() -> None:
    """Wait until no save is under way, however it ended."""
    if _last and _last.thread:
        _last.thread.join()


def forgive() -> None:
    """Do not raise what became of the last save, which has been printed."""
    settle()
    if _last:
        _last.reported = True


def wait() -> None:
    """Wait until the last save is complete.

    Raises:
      CheckpointError: it could not be written, and nobody was told yet.
    """
    if _last and not _last.reported:
        _last.wait()


def save(
    state: Any,
    directory: str | os.PathLike,
    tag: str | float | None = None,
    *,
    notes: Mapping[str, Any] | None = None,
    latest: bool = True,
    max_to_keep: int | None = None,
    without: Collection[str] = (),
) -> Save:
    """Save `state` as directory/tag, on all processes; the files are written while the caller goes on.

    Only one save is under way at a time: another one, `restore` and the program's end wait for it. A checkpoint is
    there whole or not at all, and one of the same tag is there until the new one is.

    Args:
      state: a tree of arrays, as a `TrainState`; a train step may take its buffers at once.
      tag: default `global_step{state.step}`, which waits for that step.
      notes: what JSON can hold, to be read back from `Checkpoint.notes`.
      latest: name it in directory/latest.
      max_to_keep: remove the oldest checkpoints with default tags up to this step, so that at most so many are left;
        those that somebody named stay.
      without: names of leaves to leave out; their checksums are kept.

    Returns:
      The save; `.wait()` waits for its end.

    Raises:
      ConfigError: a tag that is no name or not the same on all processes, notes that are not JSON.
      CheckpointError: the directory cannot be written to, or the save before this one failed, which is raised when
        this one is under way. On all processes.
    """
    global _last
    settle()
    earlier = _last.error if _last and not _last.reported else None
    leaves = named(state)
    if tag is None:
        if not hasattr(state, "step"):
            raise ConfigError("saving a checkpoint: this state has no `step` that a default tag could say; pass tag=")
        tag = DEFAULT_TAG.format(int(state.step))
    path, room, earlier = _agreed_place(directory, tag, notes, has_room(leaves), earlier)
    heartbeat.begin()
    copies, sums = snapshot(leaves, room)
    described = {name: [str(copies[name].dtype), list(copies[name].shape)] for name in sorted(copies)}
    copies = {name: x for name, x in copies.items() if name not in without}
    about = {"keys": key_names(leaves), "notes": json.loads(json.dumps(notes or {}, default=_number))}

    def end() -> None:
        all_of_it = {n: [*what, int(s)] for (n, what), s in zip(described.items(), np.asarray(sums), strict=True)}
        stored = {name: said for name, said in all_of_it.items() if name not in without}
        left_out = {name: said for name, said in all_of_it.items() if name in without}
        commit(path, {"leaves": stored, "without": left_out, **about}, latest, max_to_keep)

    _last = Save(path)
    _last.thread = threading.Thread(target=_write, args=(_last, copies, end), name="jzero checkpoint")
    _last.thread.start()
    heartbeat.finished_when(None)
    if earlier:
        raise CheckpointError(f"{earlier}. {path}, the one after it, is being written")
    return _last


def _agreed_place(
    directory: str | os.PathLike, tag: str | float, notes: Any, room: bool, earlier: str | None
) -> tuple[Path, bool, str | None]:
    """(where to save, with a place made for it; whether there is room for copies; what became of the save before), as
    all processes see it."""
    path, made = Path(), False
    said = {
        "directory": str(directory), "tag": str(tag), "room": room, "earlier": earlier, "mistake": "", "problem": ""
    }  # fmt: skip
    try:
        path = place(directory, tag)
        _check_notes(notes or {})
        if jax.process_index() == 0:
            begin(path)
            made = True
    except ConfigError as error:
        said["mistake"] = str(error)
    except (TypeError, ValueError) as error:
        said["mistake"] = f"client_state is not JSON: {error}"
    except OSError as error:
        said["problem"] = f"checkpoint {path} cannot be written: {error.strerror}: {error.filename}"
    all_said = [json.loads(text) for text in agree("saving a checkpoint", json.dumps(said), TIMEOUT)]
    errors: list[ConfigError | CheckpointError] = []
    for key, error_type in (("mistake", ConfigError), ("problem", CheckpointError)):
        errors += [error_type(one[key]) for one in all_said if one[key]]
    for key in ("directory", "tag"):
        if len({one[key] for one in all_said}) > 1:
            each = ", ".join(f"{one[key]!r} on rank {rank}" for rank, one in enumerate(all_said))
            errors.append(ConfigError(f"saving a checkpoint: {key} must be the same on all processes, but is {each}"))
    if errors:
        if made:
            shutil.rmtree(draft_of(path), ignore_errors=True)
        raise errors[0]
    failed = [one["earlier"] for one in all_said if one["earlier"]]
    return path, all(one["room"] for one in all_said), failed[0] if failed else None


def _check_notes(notes: Mapping[str, Any]) -> None:
    """Raise a TypeError or ValueError for what JSON cannot hold, and for an engine's client state with other keys."""
    json.dumps(notes, default=_number)
    if not isinstance(client := notes.get("client", {}) if "engine" in notes else {}, Mapping):
        raise TypeError(f"{client!r} is no dictionary")
    queue: list[Any] = [client]
    while queue:
        x = queue.pop()
        for key in x if isinstance(x, Mapping) else ():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} would come back as a string")
        queue += x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ()


def _number(x: Any) -> Any:
    """A number of NumPy's or JAX's as JSON has it."""
    if getattr(x, "shape", None) == ():
        return x.item()
    raise TypeError(f"{x!r} is of type {type(x).__name__}")


def _write(save: Save, copies: dict[str, jax.Array], end: Callable[[], None]) -> None:
    """Write this process's part of the arrays; when all have, process 0 makes it the checkpoint."""
    draft = draft_of(save.path)
    try:
        drop_late_answers()
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)  # floats do not become much smaller

        def arrays() -> None:
            host = jax.block_until_ready(to_host(copies))
            copies.clear()  # the devices' memory is free again
            _check_shared(draft)
            chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in host}
            handler.save(epath.Path(draft) / STATE, args=ocp.args.PyTreeSave(nest(host), nest(chunks)))

        def whole() -> None:
            handler.finalize(epath.Path(draft) / STATE)
            end()

        error = anyone("a checkpoint's arrays", _failure(arrays))
        if not error:
            error = anyone("a checkpoint's end", _failure(whole) if jax.process_index() == 0 else None)
    except Exception as late:  # a process that never came, or the service of all is gone
        error = str(late)
    if error:
        save.error = f"checkpoint {save.path} was not written: {error}"
        if jax.process_index() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            print(f"jzero: {save.error}", file=sys.stderr, flush=True)


def _failure(work: Callable[[], None]) -> str | None:
    """What work raises, in a line."""
    try:
        work()
    except Exception as error:
        said = in_a_line(error)
        if "interpreter shutdown" in said:
            said += " (this Python starts no thread then: call jzero.checkpoint.wait() at the script's end)"
        return f"{said} (process {jax.process_index()})" if jax.process_count() > 1 else said
    return None


def _check_shared(draft: Path, patience: float = 10.0) -> None:
    """Raise unless this host sees what process 0 made; network file systems take their time."""
    end = time.monotonic() + patience
    while not (draft / STATE).is_dir():
        if time.monotonic() > end:
            raise OSError(f"{draft} does not appear on this host: all hosts must see the same directory")
        time.sleep(0.1)


# Orbax starts threads and executors, which Python no longer allows when it joins threads at the program's end: wait
# before that. (Python 3.12.0 and 3.12.1 allow none even then.)
threading._register_atexit(settle)  # type: ignore[attr-defined]


@atexit.register
def _last_word() -> None:
    """A program whose last checkpoint failed, and was not told, does not end as if all were well."""
    if _last and _last.error and not _last.reported:
        sys.stdout.flush()
        os._exit(1)
