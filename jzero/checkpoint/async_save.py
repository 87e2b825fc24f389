"""Asynchronous saves: a snapshot now, the files in a thread while training continues.

Several processes commit in two phases. In the first, every process writes its part of the arrays into the shared draft.
Then all exchange errors (`share_problem`, which is a barrier too). Only if no process failed does process 0 run the
second phase: merge Orbax's metadata, add the notes, rename the draft. A second exchange tells all processes the
outcome, so a save succeeds on every process or fails on every process.
"""

from __future__ import annotations

import atexit
import contextlib
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
from etils import epath

from jzero._compat import before_threads_end
from jzero.checkpoint.checksums import is_key
from jzero.checkpoint.directory import DEFAULT_TAG, STATE, begin_draft, checkpoint_path, commit, draft_path
from jzero.checkpoint.lock import check_lock, hold
from jzero.checkpoint.orbax_trees import import_orbax, nest
from jzero.checkpoint.snapshot import copy_to_pinned_memory, has_room, snapshot
from jzero.display.slow_work import slow_work
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import gather_texts, share_problem
from jzero.errors import CheckpointError, ConfigError, in_a_line, with_type
from jzero.layout.offload import on_host
from jzero.stored_names import stored_names
from jzero.tree import PyTree, named

TIMEOUT = 1800.0  # seconds that a process waits for the others to call save
CHUNK = 64 * 2**20  # bytes: the least that a reader of part of a leaf must decode

_last: Save | None = None


class Save:
    """A running or finished save.

    Attributes:
      path: of the checkpoint.
      error: the reason if it failed, else None.
      reported: whether the caller has been told about the error.
      thread: writes the files.
      bytes: of the arrays that all processes write.
      began, ended: of the call and of the thread, in UTC seconds.
      stall, background: seconds of the call, and of the thread.
    """

    def __init__(self, path: Path, began: float):
        self.path, self.reported, self.began = path, False, began
        self.bytes, self.ended, self.stall, self.background = 0, began, 0.0, 0.0
        self.error: str | None = None
        self.thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()

    def __repr__(self) -> str:
        return f"Save({str(self.path)!r}, {'failed' if self.error else 'complete' if self.done else 'being written'})"

    def _start(self, copies: dict[str, jax.Array], finish: Callable[[], None]) -> None:
        """Write the copies in a thread, then `finish`."""
        self.bytes = sum(x.nbytes for x in copies.values())
        self.thread = threading.Thread(target=_write, args=(self, copies, finish), name="jzero checkpoint")
        try:
            self.thread.start()
        except RuntimeError:  # the system has no more threads
            _write(self, copies, finish)

    def settle(self) -> None:
        """Wait for the thread, without raising the error."""
        if self.thread is not None and self.thread.is_alive():
            with slow_work(f"writing {self.path.name}"):
                self.thread.join()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its path.

        Raises:
          CheckpointError: it could not be written; raised on all processes.
        """
        self.settle()
        if self.error:
            self.reported = True
            raise CheckpointError(self.error)
        return self.path


def last_save() -> Save | None:
    """Return this process's last save, running or finished; None if there is none."""
    return _last


def wait_ignoring_errors() -> None:
    """Wait for the running save, if any, without raising its error."""
    if _last:
        _last.settle()


def forgive() -> None:
    """Wait for the last save without raising its error, which was already printed."""
    wait_ignoring_errors()
    if _last:
        _last.reported = True


def wait() -> None:
    """Wait until the last save is complete.

    Raises:
      CheckpointError: it could not be written, and no earlier call has raised the error.
    """
    if _last and not _last.reported:
        _last.wait()


@slow_work("saving a checkpoint")
def save(
    state: PyTree, directory: str | os.PathLike, tag: str | float | None = None, *,
    notes: Mapping[str, Any] | None = None, latest: bool = True, max_to_keep: int | None = None,
    without: Collection[str] = (),
) -> Save:  # fmt: skip
    """Save `state` as directory/tag; the files are written in a thread. All processes call it.

    If offload keeps a part of the state in host memory, the files are written before the call returns.

    One save runs at a time: the next save, `restore` and the program's exit wait for it. A checkpoint is complete or
    absent, and a tag's previous checkpoint exists until the new one replaces it.

    Args:
      state: a tree of arrays, such as a `TrainState`. A train step may donate its buffers immediately.
      directory: shared by all hosts.
      tag: default `global_step{state.step}`; reading the step waits for the devices.
      notes: JSON data, available as `Checkpoint.notes`.
      latest: whether to write the tag to directory/latest.
      max_to_keep: keep this many checkpoints with default tags up to this step and delete older ones. Checkpoints with
        tags that you chose are never deleted.
      without: names of leaves to omit; their checksums are recorded.

    Returns:
      The save; `.wait()` waits until it is complete.

    Raises:
      ConfigError: an invalid tag, a tag or directory that differs between processes, notes that are not JSON, or a
        directory that another job writes into.
      CheckpointError: the directory cannot be written, or the previous save failed (this save is running nevertheless).
        Raised on all processes.
    """
    global _last
    import_orbax()
    began = time.time()
    wait_ignoring_errors()
    leaves = named(state)
    names = stored_names(state, leaves)
    without = {stored for name in without for stored in names.get(name, (name,))}
    tag = _default_tag(state) if tag is None else tag
    # A copy of what lies in host memory would double it, so that part is written before the next step may change it.
    offloaded = any(on_host(x) for x in leaves.values())
    path, room, earlier = _agree_on_path(directory, tag, notes, not offloaded and has_room(leaves))
    with heartbeat.work():
        copies, sums = snapshot(leaves, names, room)
        described = {name: [str(copies[name].dtype), list(copies[name].shape)] for name in sorted(copies)}
        copies = {name: x for name, x in copies.items() if name not in without}
        keys = {names[name][0]: str(jax.random.key_impl(x)) for name, x in leaves.items() if is_key(x)}
        about = {"keys": keys, "notes": json.loads(json.dumps(notes or {}, default=_number))}

        def finish() -> None:
            commit(path, _entries(described, sums, without) | about, latest, max_to_keep)

        _last = Save(path, began)
        _last._start(copies, finish)
        if offloaded:  # inside, so that the watchdog sees a write that hangs
            _last.wait()
    _last.stall = time.time() - began
    if earlier:
        raise CheckpointError(f"{earlier}. The next checkpoint, {path}, {'was' if offloaded else 'is being'} written")
    return _last


def _entries(described: Mapping[str, list], sums: jax.Array, without: Collection[str]) -> dict[str, dict[str, list]]:
    """Return {name: [dtype, shape, checksum]} of the leaves that are stored, and of those that are omitted."""
    entries = {name: [*kind, int(s)] for (name, kind), s in zip(described.items(), np.asarray(sums), strict=True)}
    stored = {name: entry for name, entry in entries.items() if name not in without}
    return {"leaves": stored, "without": {name: entry for name, entry in entries.items() if name in without}}


def _default_tag(state: PyTree) -> str:
    if not hasattr(state, "step"):
        raise ConfigError("saving a checkpoint: this state has no `step` for the default tag; pass tag=")
    return DEFAULT_TAG.format(int(state.step))


def _agree_on_path(
    directory: str | os.PathLike, tag: str | float, notes: Mapping[str, Any] | None, room: bool
) -> tuple[Path, bool, str | None]:
    """Make the draft and compare the arguments of all processes.

    Every process reports its errors instead of raising them, because a process that raised alone would leave the others
    waiting. One exchange then decides for all.

    Returns:
      (the checkpoint's path, whether every process has room for copies, the previous save's error)
    """
    path, earlier = Path(), _last.error if _last and not _last.reported else None
    mistake = problem = ""
    try:
        path = checkpoint_path(directory, tag)
        _check_notes(notes or {})
        if jax.process_index() == 0:
            hold(path.parent)
            begin_draft(path)
    except ConfigError as error:
        mistake = str(error)
    except (TypeError, ValueError) as error:
        mistake = f"client_state is not JSON: {error}"
    except OSError as error:
        problem = f"checkpoint {path} cannot be written: {error.strerror}: {error.filename}"
    mine = [str(directory), str(tag), room, earlier, mistake, problem]
    reports = [json.loads(text) for text in gather_texts("saving a checkpoint", json.dumps(mine), TIMEOUT)]
    directories, tags, rooms, failed, mistakes, problems = zip(*reports, strict=True)
    errors: list[ConfigError | CheckpointError] = [*map(ConfigError, filter(None, mistakes))]
    errors += map(CheckpointError, filter(None, problems))
    for key, values in (("directory", directories), ("tag", tags)):
        if len(set(values)) > 1:
            each = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            errors.append(ConfigError(f"saving a checkpoint: {key} must be the same on all processes; it is {each}"))
    if errors:
        if jax.process_index() == 0 and not mistake and not problem:  # the draft is this save's
            shutil.rmtree(draft_path(path), ignore_errors=True)
        raise errors[0]
    return path, all(rooms), next(filter(None, failed), None)


def _check_notes(notes: Mapping[str, Any]) -> None:
    """Raise a TypeError or ValueError for notes that JSON cannot represent, or would return with other keys."""
    json.dumps(notes, default=_number)
    if not isinstance(client := notes.get("client", {}) if "engine" in notes else {}, Mapping):
        raise TypeError(f"{client!r} is not a dictionary")
    _check_keys(client)


def _check_keys(x: Any) -> None:
    for key in x if isinstance(x, Mapping) else ():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} would be read back as a string")
    for part in x.values() if isinstance(x, Mapping) else x if isinstance(x, list | tuple) else ():
        _check_keys(part)


def _number(x: Any) -> int | float | bool:
    """Convert a NumPy or JAX scalar to a Python number."""
    if getattr(x, "shape", None) == ():
        return x.item()
    raise TypeError(f"{x!r} has type {type(x).__name__}")


def _write(save: Save, copies: dict[str, jax.Array], finish: Callable[[], None]) -> None:
    """Write this process's part of the arrays; once all processes have, process 0 completes the checkpoint."""
    began = time.time()
    try:
        error = _complete(save.path, copies, finish)
    except ConfigError as unreachable:  # a process did not call save, or the coordination service is gone
        error = str(unreachable)
    except BaseException as died:  # also SystemExit, and what Rust's and C++'s libraries raise: none reaches the caller
        error = with_type(died)
    save.error = error and f"checkpoint {save.path} was not written: {error}"
    if error and jax.process_index() == 0:
        shutil.rmtree(draft_path(save.path), ignore_errors=True)
        print(f"jzero: {save.error}", file=sys.stderr, flush=True)
    save.ended = time.time()
    save.background = save.ended - began


def _complete(path: Path, copies: dict[str, jax.Array], finish: Callable[[], None]) -> str | None:
    """Run both phases of a save; return the reason if it failed on any process, else None."""
    draft, present = draft_path(path), list[Presence]()  # the second is empty until this host sees the draft
    ocp = import_orbax()
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)  # floats hardly compress

    def arrays() -> None:
        host = jax.block_until_ready(copy_to_pinned_memory(copies))
        copies.clear()  # frees the copies on the devices
        _check_shared(draft)
        present.append(Presence(draft, path))
        chunks = {name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in host}
        handler.save(epath.Path(draft) / STATE, args=ocp.args.PyTreeSave(nest(host), nest(chunks)))
        present[0].check()

    def complete() -> None:
        check_lock(path.parent)
        present[0].check()
        handler.finalize(epath.Path(draft) / STATE)
        present[0].check()
        finish()

    def failure(work: Callable[[], None]) -> str | None:
        """Run `work`; return its exception as one line, or None. A draft that has vanished explains any exception."""
        try:
            try:
                work()
            except BaseException:
                for one in present:
                    one.check()
                raise
        except BaseException as error:  # of any kind, or the other processes would wait for this one
            line = in_a_line(error)
            if "interpreter shutdown" in line:
                line += " (this Python cannot start threads at exit: call jzero.checkpoint.wait() at the script's end)"
            return f"{line} (process {jax.process_index()})" if jax.process_count() > 1 else line
        return None

    try:
        error = share_problem("a checkpoint's arrays", failure(arrays))
        if not error:
            error = share_problem("a checkpoint's end", failure(complete) if jax.process_index() == 0 else None)
    finally:
        for one in present:
            one.close()
    return error


class Presence:
    """Notices that a draft, which will be renamed to the checkpoint `path`, was deleted or unmounted meanwhile.

    The path alone does not show it: TensorStore makes missing directories again, and the checkpoint would be complete
    but for the files that were already in the deleted one.

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
        """Close the directory. It was only read, so a failure means nothing for the files."""
        with contextlib.suppress(OSError):  # the script has closed all descriptors
            os.close(self._descriptor)


def vanished(draft: Path) -> OSError:
    """Make the error that names the missing directory: the draft, or the one that it was in."""
    missing = draft if draft.parent.exists() else draft.parent
    return OSError(f"{missing} vanished during the save: it was deleted or unmounted")


def _check_shared(draft: Path, patience: float = 10.0) -> None:
    """Raise an OSError unless this host sees the draft that process 0 made; network file systems may be slow."""
    end = time.monotonic() + patience
    while not (draft / STATE).is_dir():
        if time.monotonic() > end:
            if jax.process_index() == 0:  # which made it
                raise vanished(draft)
            raise OSError(f"{draft} does not exist on this host: all hosts must share the directory")
        time.sleep(0.1)


# Orbax starts threads, which Python forbids once it joins threads at the program's end.
before_threads_end(wait_ignoring_errors)


@atexit.register
def _exit_with_error() -> None:
    """Exit with status 1 if the last save failed and no call has raised its error."""
    if _last and _last.error and not _last.reported:
        sys.stdout.flush()
        os._exit(1)
