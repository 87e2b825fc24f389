"""Reads a checkpoint into a state of any layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jzero.checkpoint.layers import Names, read_layers
from jzero.checkpoint.leaves import is_key
from jzero.checkpoint.other_moments import with_moments_of
from jzero.checkpoint.reader import Checkpoint
from jzero.distributed.place import log_dist
from jzero.errors import ConfigError, some_of
from jzero.fp8 import history
from jzero.stored_names import stored_names
from jzero.tree import PyTree, named


def restore(
    directory: str | os.PathLike, shardings: PyTree, *, tag: str | float | None = None, shapes: PyTree = None
) -> PyTree:
    """Read a state with the given shardings, from a checkpoint of any layout. All processes call it.

    The loss scale is the saved one. To restore into another precision, start with a new loss scale:
    `dataclasses.replace(state, loss_scale=step.new_loss_scale(state.loss_scale.skipped))`. fp8 histories that the
    checkpoint lacks start as zeros.

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
    of_fp8 = {part for part in (*stored, *checkpoint.shapes) if part.startswith(history.LEAVES)}
    optional = of_fp8 if wanted and hasattr(shardings, "fp8") else set()  # of a TrainState
    required = {part: shape for part, shape in stored.items() if part not in optional}
    checkpoint.check_fit(required, checkpoint.shapes.keys() - optional)
    same = required.keys() | {part for part in optional & stored.keys() if checkpoint.shapes.get(part) == stored[part]}
    taken = {name: place for name, place in places.items() if same.issuperset(names[name])}
    read = read_layers(checkpoint, taken, {name: x.shape for name, x in wanted.items()}, names)
    zeros = [name for name in places if name not in taken]
    report_histories(checkpoint, {name: wanted[name] for name in zeros}, names)
    read |= {name: jnp.zeros(wanted[name].shape, wanted[name].dtype, device=places[name]) for name in zeros}
    leaves = match_dtypes({name: read[name] for name in places}, wanted)
    return jax.tree.unflatten(jax.tree.structure(shardings), leaves.values())


def report_histories(checkpoint: Checkpoint, zeros: Mapping[str, Any], names: Names) -> None:
    """Print which fp8 histories start as zeros, and why; `zeros` has shapes by name."""
    found: dict[str, list[str]] = {}
    for name in (name for name in zeros if name.startswith(history.LEAVES)):
        steps = {checkpoint.shapes[part][-1] for part in names[name] if part in checkpoint.shapes}
        why = "another fp8.amax_history_len" if steps - {zeros[name].shape[-1]} else "only the weights are read"
        found.setdefault(why if steps else "not in the checkpoint", []).append(name.removeprefix(history.LEAVES))
    for why, weights in found.items():
        log_dist(f"fp8 histories start at zero ({why}): {some_of(weights)}", ranks=[0])


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
