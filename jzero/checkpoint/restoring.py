"""Reads a checkpoint into a state of any layout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.checkpoint.layers import Names, read_layers
from jzero.checkpoint.leaves import is_key
from jzero.checkpoint.other_moments import with_moments_of
from jzero.checkpoint.reader import Checkpoint
from jzero.errors import ConfigError
from jzero.fp8 import history
from jzero.stored_names import stored_names
from jzero.tree import PyTree, named


def restore(
    directory: str | os.PathLike, shardings: PyTree, *, tag: str | float | None = None, shapes: PyTree = None
) -> PyTree:
    """Read a state with the given shardings, from a checkpoint of any layout. All processes call it.

    The loss scale is the saved one. To restore into another precision, start with a new loss scale:
    `dataclasses.replace(state, loss_scale=step.new_loss_scale(state.loss_scale.skipped))`. Histories for fp8 that the
    checkpoint lacks are zeros: not seen.

    Args:
      directory, tag: as given to `save`; without a tag, the checkpoint that directory/latest names.
      shardings: a tree, such as `TrainStep.state_shardings`.
      shapes: the same tree of arrays or ShapeDtypeStructs, such as `TrainStep.state_shapes`. Shapes are compared before
        reading, and leaves are cast to these dtypes. Default: the shapes and dtypes that were saved.

    Raises:
      ConfigError: no checkpoint, or one of another model or optimizer; the message names the leaves that are missing,
        extra or of another shape. Raised on all processes.
      CheckpointError: the checkpoint is damaged. Raised on all processes.
    """
    checkpoint = Checkpoint.find(directory, tag)
    wanted = named(shapes) if shapes is not None else {}
    places = named(shardings)
    if not wanted and getattr(shardings, "names", None) is not None:
        raise ConfigError("restore: a model with stack= needs shapes=step.state_shapes beside step.state_shardings")
    names = stored_names(shardings, wanted or places)
    stored = stored_shapes(wanted, names) if wanted else dict.fromkeys(places)
    checkpoint = with_moments_of(checkpoint, stored) if wanted else checkpoint
    new = [name for name in wanted if name.startswith(history.LEAVES) and not _has(checkpoint, stored, names[name])]
    optional = {part for part in (*stored, *checkpoint.shapes) if wanted and part.startswith(history.LEAVES)}
    ours = checkpoint.shapes.keys() - optional
    checkpoint.check_fit({part: shape for part, shape in stored.items() if part not in optional}, ours)
    taken = {name: place for name, place in places.items() if name not in new}
    read = read_layers(checkpoint, taken, {name: x.shape for name, x in wanted.items()}, names)
    read |= {name: jnp.zeros(wanted[name].shape, wanted[name].dtype, device=places[name]) for name in new}
    leaves = match_dtypes({name: read[name] for name in places}, wanted)
    return jax.tree.unflatten(jax.tree.structure(shardings), leaves.values())


def _has(checkpoint: Checkpoint, stored: Mapping[str, tuple[int, ...] | None], parts: Sequence[str]) -> bool:
    return all(part in checkpoint.shapes and checkpoint.shapes[part] == stored[part] for part in parts)


def stored_shapes(leaves: Mapping[str, Any], names: Names) -> dict[str, tuple[int, ...] | None]:
    """Map the names in a checkpoint to the shapes that the leaves of a state require there; None: any."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, x in leaves.items():
        shape = expected_shape(x)
        shapes |= dict.fromkeys(names[name], shape if len(names[name]) == 1 or shape is None else shape[1:])
    return shapes


def expected_shape(x: Any) -> tuple[int, ...] | None:
    """Return a leaf's required shape in the checkpoint; None (any) for random keys, whose data differs in shape."""
    return None if is_key(x) else tuple(x.shape)


def match_dtypes(leaves: Mapping[str, jax.Array], wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Cast the leaves to the dtypes of `wanted`; random keys keep theirs."""
    return {
        n: x if n not in wanted or is_key(x) or x.dtype == wanted[n].dtype else _astype(x, wanted[n].dtype)
        for n, x in leaves.items()
    }


_astype = jax.jit(lambda x, dtype: x.astype(dtype), static_argnums=1)
