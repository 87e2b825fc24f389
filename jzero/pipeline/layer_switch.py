"""Layers of different structure as one function: the same program on every stage of a pipeline.

The values between two layers have a different shape at every boundary. They are packed into zero-padded buffers of one
shape, and a `lax.switch` runs the layers of one part. A branch must not contain a collective: devices in different
branches would wait for each other forever. So all parameters are arguments, gathered before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jzero.adapters.criterion import inputs_and_labels
from jzero.errors import ConfigError
from jzero.model import WHOLE, Inputs, replace_state, uniform
from jzero.pipeline.module import PipelineModule
from jzero.remat import as_input, only_inputs
from jzero.tree import partition

Buffers = dict[str, jax.Array]  # "float" and "other", each [length], where there are values of the kind


def switched(
    model: PipelineModule, boundaries: Sequence[int], params: Any, inputs: Inputs, is_state: Any, offload: bool = False
) -> tuple[Callable[[Any], Buffers], Callable[[Any, Buffers, Any, Any], Any], Callable[[Buffers, Any, Any], Any]]:
    """Convert a list of layers, equal or not, to (prefix, chunk, suffix).

    prefix(inputs) -> x; chunk(params, x, part, rng) -> (x, new state); suffix(x, inputs, rng) -> loss

    `chunk` runs the layers [boundaries[part], boundaries[part + 1]); `part` is an int32 and may be traced. It keeps
    only its arguments for the backward pass: a bare switch would keep the residuals of all its branches.

    Args:
      params: as `PipelineModule.apply` takes them; `inputs`: one micro-batch. Arrays or ShapeDtypeStructs, for shapes.
      is_state: a tree of bools like `params`.
      offload: whether `chunk` keeps x in host memory.

    Raises:
      ConfigError: complex numbers or random keys between layers.
    """
    run = [partial(uniform(model, model.run, WHOLE), start=start, stop=stop) for start, stop in pairwise(boundaries)]
    trees = [jax.eval_shape(lambda x: x, inputs_and_labels(inputs.batch)[0])]
    for layers in run:
        y = jax.eval_shape(lambda params, x, layers=layers: layers(params, x=x, rng=None)[0], params, trees[-1])
        trees.append(y)
    pack, unpack = _packing(trees)

    @partial(jax.checkpoint, policy=only_inputs(offload))
    def chunk(params: Any, x: Buffers, part: Any, rng: jax.Array | None) -> Any:
        x = as_input(x)

        def branch(p: int) -> Any:
            y, new = run[p](params, x=unpack(x, trees[p]), rng=rng)
            return pack(y), replace_state(partition(params, is_state)[0], new)  # of all layers, whatever the branch

        return jax.lax.switch(part, [partial(branch, p) for p in range(len(run))])

    def suffix(x: Buffers, inputs: Inputs, rng: jax.Array | None) -> Any:
        return model.end(unpack(x, trees[-1]), inputs.batch, inputs.extra)

    return lambda inputs: pack(inputs_and_labels(inputs.batch)[0]), chunk, suffix


def _packing(trees: Sequence[Any]) -> tuple[Callable[[Any], Buffers], Callable[[Buffers, Any], Any]]:
    """Make `pack(tree) -> buffers` and `unpack(buffers, shapes) -> tree`, with room for any of the `trees`."""
    layout: dict[str, tuple[Any, int]] = {}  # kind -> dtype, length
    for kind in ("float", "other"):
        leaves = [[leaf for leaf in jax.tree.leaves(tree) if kind_of(leaf) == kind] for tree in trees]
        if dtypes := {leaf.dtype for some in leaves for leaf in some}:
            wide = jnp.int64 if any(dtype.itemsize > 4 for dtype in dtypes) else jnp.int32
            dtype = reduce(jnp.promote_types, dtypes) if kind == "float" else wide
            layout[kind] = dtype, max(sum(leaf.size for leaf in some) for some in leaves)

    def pack(tree: Any) -> Buffers:
        buffers = {}
        for kind, (dtype, length) in layout.items():
            flat = [leaf.astype(dtype).reshape(-1) for leaf in jax.tree.leaves(tree) if kind_of(leaf) == kind]
            buffers[kind] = jnp.concatenate([*flat, jnp.zeros(length - sum(map(len, flat)), dtype)])
        return buffers

    def unpack(buffers: Buffers, shapes: Any) -> Any:
        used = dict.fromkeys(layout, 0)

        def take(leaf: Any) -> jax.Array:
            kind = kind_of(leaf)
            start = used[kind]
            used[kind] += leaf.size
            return buffers[kind][start : used[kind]].reshape(leaf.shape).astype(leaf.dtype)

        return jax.tree.map(take, shapes)

    return pack, unpack


def kind_of(leaf: Any) -> str:
    """Return the kind of buffer in which a leaf goes from stage to stage; raise a ConfigError if there is none."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return "float"
    if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == bool:
        return "other"
    raise ConfigError(f"pipeline: {leaf.dtype} cannot go from stage to stage; give floats, integers or bools")
