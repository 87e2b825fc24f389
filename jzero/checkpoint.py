"""Saving and restoring a TrainState with Orbax: global arrays, so any layout reads what any other wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jzero.errors import ConfigError

_LATEST, _STATE, _NOTES = "latest", "state", "notes.json"


def save(state: Any, directory: str | os.PathLike, tag: str, notes: Mapping[str, Any]) -> Path:
    """Write `state` and the JSON `notes` to directory/tag, then name the tag in directory/latest.

    Raises:
      ConfigError: a checkpoint of that tag exists, or the notes are not JSON.
    """
    path = Path(directory).absolute() / tag
    if path.exists():
        raise ConfigError(f"checkpoint {path} exists already: choose another tag or directory, or remove it")
    try:
        text = json.dumps(notes)
    except TypeError as error:
        raise ConfigError(f"client_state is not JSON: {error}") from None
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / _STATE, state)
    if jax.process_index() == 0:
        (path / _NOTES).write_text(text)
        (path.parent / _LATEST).write_text(tag)
    return path


def restore(directory: str | os.PathLike, tag: str | None, shapes: Any, shardings: Any) -> tuple[Path, Any, dict]:
    """(path, state, notes) of directory/tag, the state straight into buffers laid out by `shardings`.

    Args:
      tag: None for the one that directory/latest names.
      shapes, shardings: `TrainStep.state_shapes` and `TrainStep.state_shardings`, of any mesh and stage.

    Raises:
      ConfigError: nothing there, or not complete.
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
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(path / _STATE, target)
    return path, state, json.loads((path / _NOTES).read_text())
