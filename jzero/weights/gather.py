"""Gathers the parameters of a running program from all devices, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.mesh import PIPE
from jzero.tree import PyTree
from jzero.weights.name_map import Box, dotted
from jzero.zero import ParamLayout


def gather(params: PyTree, leaves: PyTree, mesh: Mesh, dtype: np.dtype | None) -> Iterator[tuple[str, Box, np.ndarray]]:
    """Yield (dotted name, box, values) for all parameters; a stacked leaf comes one layer at a time.

    All processes must exhaust the iterator, because every gather is a collective. Device memory: one layer, gathered on
    every device.

    Args:
      params: a tree of arrays.
      leaves: the tree of their `ParamLayout`s.
      mesh: of the parameters.
      dtype: for floating-point parameters, cast before the gather so that fewer bytes move; None keeps theirs.
    """
    for leaf, x in zip(jax.tree.leaves(leaves), jax.tree.leaves(params), strict=True):
        to = dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        part = _part(leaf, mesh, to)
        for i in range(leaf.shape[0] if leaf.stacked else 1):
            values = np.asarray(part(x, jnp.int32(i)).addressable_data(0))
            box = tuple(slice(0, n) for n in leaf.shape)
            yield dotted(leaf.name), (slice(i, i + 1), *box[1:]) if leaf.stacked else box, values


def _part(leaf: ParamLayout, mesh: Mesh, dtype: np.dtype) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Compile the function that gathers layer i of a leaf [1, ...], or the whole leaf if it is not stacked."""

    def layer(x: jax.Array, i: jax.Array) -> jax.Array:
        if not leaf.stacked:
            return x.astype(dtype)
        i = i - lax.axis_index(PIPE) * len(x) if leaf.on_pipe else i
        here = lax.dynamic_slice_in_dim(x, jnp.clip(i, 0, len(x) - 1), 1).astype(dtype)
        if not leaf.on_pipe:
            return here
        # Only the stage that has layer i contributes. A select drops the others' values, because 0 * NaN is NaN.
        return lax.psum(jnp.where((i >= 0) & (i < len(x)), here, jnp.zeros_like(here)), PIPE)

    spec = PartitionSpec(None, *leaf.spec[1:]) if leaf.stacked else leaf.spec
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(leaf.spec, PartitionSpec()), out_specs=spec, check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))
