"""Saving and restoring a TrainState with Orbax: global arrays, so any layout reads what any other wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jzero import progress
from jzero.agreement import agree, anyone
from jzero.errors import ConfigError
from jzero.zero import path_name

_LATEST, _STATE, _NOTES = "latest", "state", "notes.json"


def save(state: Any, directory: str | os.PathLike, tag: str, notes: Mapping[str, Any]) -> Path:
    """Write `state` and the JSON `notes` to directory/tag, then name the tag in directory/latest.

    A checkpoint is complete when its notes are there, which are written last; what an interrupted save left is
    replaced.

    Raises:
      ConfigError: a complete checkpoint of that tag exists, a tag that is a path, or notes that are not JSON.
    """
    if Path(tag).name != tag:
        raise ConfigError(f"tag = {tag!r}: must be a name without separators")
    path = Path(directory).absolute() / tag
    there = f"checkpoint {path} exists already: choose another tag or directory, or remove it"
    if problem := anyone("a checkpoint", there if (path / _NOTES).exists() else None):
        raise ConfigError(problem)
    try:
        text = json.dumps(notes)
    except TypeError as error:
        raise ConfigError(f"client_state is not JSON: {error}") from None
    progress.begin()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / _STATE, state, force=True)
    if jax.process_index() == 0:
        _write(path / _NOTES, text)
        _write(path.parent / _LATEST, tag)
    progress.finished_when(None)
    agree("a checkpoint's end", tag)  # no process reads what is not there yet
    return path


def _write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = file.with_name(file.name + ".tmp")
    draft.write_text(text)
    os.replace(draft, file)


def restore(directory: str | os.PathLike, tag: str | None, shapes: Any, shardings: Any) -> tuple[Path, Any, dict]:
    """(path, state, notes) of directory/tag, the state straight into buffers laid out by `shardings`.

    Args:
      tag: None for the one that directory/latest names.
      shapes, shardings: `TrainStep.state_shapes` and `TrainStep.state_shardings`, of any mesh and stage.

    Raises:
      ConfigError: nothing there, not complete, or of another model or optimizer.
    """
    directory = Path(directory).absolute()
    if tag is None:
        if not (directory / _LATEST).exists():
            raise ConfigError(
                f"{directory} holds no checkpoint (no file {_LATEST!r}): give save_checkpoint's directory"
            )
        tag = (directory / _LATEST).read_text().strip()
    path = directory / tag
    if not (path / _NOTES).exists():
        raise ConfigError(f"checkpoint {path} does not exist or is not complete")
    with ocp.StandardCheckpointer() as checkpointer:
        _check_fit(path, checkpointer.metadata(path / _STATE).item_metadata.tree, shapes)
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
        state = checkpointer.restore(path / _STATE, target)
    return path, state, json.loads((path / _NOTES).read_text())


def _check_fit(path: Path, stored: Any, shapes: Any) -> None:
    """Raise a ConfigError that names the leaves in which a checkpoint and a state differ."""

    def described(tree: Any) -> dict[str, tuple]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {path_name(key): tuple(x.shape) for key, x in leaves if hasattr(x, "shape")}

    keys_as_stored = jax.tree.map(
        lambda x: jax.eval_shape(jax.random.key_data, x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, shapes
    )
    there, here = described(stored), described(keys_as_stored)
    problems = [f"missing {name}" for name in sorted(here.keys() - there.keys())]
    problems += [f"extra {name}" for name in sorted(there.keys() - here.keys())]
    problems += [
        f"{name} is {there[name]}, not {here[name]}" for name in sorted(here.keys() & there.keys())
        if there[name] != here[name]
    ]  # fmt: skip
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConfigError(f"checkpoint {path} is of another model or optimizer: {', '.join(problems[:8])}{more}")
