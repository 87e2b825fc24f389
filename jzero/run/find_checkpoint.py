"""Finding the checkpoint that a run resumes from. Process 0 searches; all processes get its result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jzero.checkpoint.async_save import wait_ignoring_errors
from jzero.checkpoint.directory import LATEST, SAVING, check_home, list_checkpoints, local_path, read_latest, recover
from jzero.checkpoint.lock import hold, other_holder
from jzero.checkpoint.reader import Checkpoint
from jzero.distributed.host_collectives import check_same, gather_texts, read_on_all, run_on_all
from jzero.distributed.place import log_dist
from jzero.errors import CheckpointError, ConfigError, escaped, some_of
from jzero.run.restore import written_by_engine, wrong_notes


def hold_directory(
    resume: str | os.PathLike | None, config_directory: str | None
) -> tuple[Path | None, dict[str, Any] | None]:
    """Take the directory that a run resumes from and saves to, so that no other job writes there.

    Args:
      resume: as for `jzero.initialize`; None: none.
      config_directory: the config's `checkpoint.dir`, which "auto" means.

    Returns:
      The directory, and the batch sizes of its newest checkpoint; None, None without one.

    Raises:
      ConfigError: it cannot be written, another job holds it, or the processes were given different ones.
    """
    # Each process makes the same calls, with and without a directory: otherwise they would answer each other's.
    root = run_on_all("initialize", lambda: _resume_root(resume, config_directory))
    check_same("initialize", {"resume": root and str(root)})
    if root is None:
        return None, None
    run_on_all("initialize", lambda: hold(root) if jax.process_index() == 0 else None)
    return root, former_batch(root)


def _resume_root(resume: str | os.PathLike | None, config_directory: str | None) -> Path | None:
    if not isinstance(resume, str | os.PathLike | None) or resume == "":
        raise ConfigError(f'resume = {resume!r}: must be a directory, or "auto" for the config\'s checkpoint.dir')
    if resume == "auto" and not config_directory:
        raise ConfigError(
            'resume = "auto": no directory is set; put checkpoint.dir into the config, or pass resume="DIRECTORY"'
        )
    resume = config_directory if resume == "auto" else resume
    if not resume:
        return None
    check_home(resume, "resume")
    return local_path(resume, "resume")


def resume_from(root: Path, load: Callable[[Checkpoint], int]) -> None:
    """Load the newest readable checkpoint in a directory, if the directory holds one.

    Args:
      load: loads a checkpoint and returns its step. If it raises a CheckpointError (damage shows only when all bytes
        are read), the next older checkpoint is tried.

    Raises:
      ConfigError: the newest checkpoint belongs to another model or optimizer.
      CheckpointError: there are checkpoints, and none is readable. A run never starts from scratch silently.
    """
    problems = []
    for name, problem in _read_on_process_0("looking for checkpoints to resume from", lambda: _candidates(root)):
        if not problem:
            try:
                source = Checkpoint.find(root, name)
                step = load(source)
                named, _ = read_latest(root)
                remark = f" ({LATEST} names {named})" if named and named != name else ""
                log_dist(f"resumed from {source.path}: step {step}{remark}")
                return
            except CheckpointError as error:
                problem = str(error)
        problems.append(problem)
        print_warning(f"skipped: {problem}")
    if problems:
        raise CheckpointError(
            f"resume: none of the {len(problems)} checkpoints in {root} can be read: {problems[0]}; name another "
            "directory, or remove them, to start from step 0"
        )
    log_dist(f"no checkpoint in {root} yet: starting at step 0")


def warn_if_not_resumed(config_directory: str) -> None:
    """Warn that a run starts from scratch in a directory with checkpoints, or in one that another job holds."""
    root = local_path(config_directory, "checkpoint.dir")
    others, holder = _read_on_process_0(
        "looking for checkpoints", lambda: ([path.name for path, _ in list_checkpoints(root)], other_holder(root))
    )
    if others:
        print_warning(
            f"starting at step 0, though {config_directory} holds {some_of(others)}: jzero --resume, or resume="
            '"auto", resumes from the newest'
        )
    if holder:
        print_warning(f"saving to checkpoint.dir may fail while {holder}")


def former_batch(root: Path) -> dict[str, Any] | None:
    """Read the batch sizes from the newest checkpoint; None if there is none, or no engine wrote it."""

    def newest() -> dict[str, Any] | None:
        recover(root)
        readable = [about["notes"] for _, about in list_checkpoints(root) if not isinstance(about, CheckpointError)]
        notes = [one for one in readable if not wrong_notes(one)]
        return notes[0].get("batch") if notes and written_by_engine(notes[0]) else None

    return _read_on_process_0("looking for the run to resume", newest)


def print_warning(text: str) -> None:
    """Print a warning on process 0."""
    if jax.process_index() == 0:
        print(f"jzero: {escaped(text)}", file=sys.stderr, flush=True)


def _read_on_process_0(task: str, work: Callable[[], Any]) -> Any:
    """Return the result of `work` on process 0, a JSON value; if it raises there, every process raises."""
    wait_ignoring_errors()
    found = read_on_all(task, lambda: work() if jax.process_index() == 0 else None)
    return json.loads(gather_texts(task, json.dumps(found))[0])


def _candidates(root: Path) -> list[tuple[str, str]]:
    """List (tag, known problem or "") of all checkpoints, newest first."""
    recover(root)
    found = [(p.name, str(about) if isinstance(about, CheckpointError) else "") for p, about in list_checkpoints(root)]
    for draft in sorted(root.glob(f"*{SAVING}")):
        print_warning(f"skipped: {draft} was not finished")
    named, problem = read_latest(root)
    if named and named not in [name for name, _ in found]:
        problem = "is not a jzero checkpoint" if (root / named).exists() else "does not exist"
        found.insert(0, (named, f"checkpoint {root / named} {problem}, and {LATEST} names it"))
    elif problem and (root / LATEST).exists():
        found.insert(0, (LATEST, f"{root}: {problem}"))
    return found
