"""Layers of different structure as one function: the same program on every stage of a pipeline.

The values between two layers have a different shape at every boundary. They are packed into zero-padded buffers of one
shape, and a `lax.switch` runs the layers of one part. A branch must not contain a collective: devices in different
branches would wait for each other forever. So all parameters are arguments, gathered before.

The cost: whole parameters and gradient sums on every stage, activations padded to the largest, and a second forward
pass of every stage in its backward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jzero.adapters.methods import inputs_and_labels
from jzero.config import ActivationCheckpointing, Config
from jzero.errors import ConfigError
from jzero.layout.sharding import PlacedModel, is_state, stack_length
from jzero.mesh import GROUP_AXES, PIPE, degrees_text, present
from jzero.model import ENDS, STACK, WHOLE, Inputs, StackModel, replace_state, uniform
from jzero.passes.remat import Remat, as_input, only_inputs
from jzero.passes.sequential import PassFacts
from jzero.passes.stack import StackView, fetch_params, scanned, unrolled
from jzero.pipeline.carry import buffer_kind
from jzero.pipeline.executor import Cut, Functions
from jzero.pipeline.module import PipelineModule
from jzero.tree import PyTree, partition, path_name

Buffers = dict[str, jax.Array]  # "float" and "other", each [length], where there are values of the kind
Pack = Callable[[PyTree], Buffers]
Unpack = Callable[[Buffers, PyTree], PyTree]


def switched_stages(placed: PlacedModel) -> Cut:
    """Make the stages of a `PipelineModule` whose layers the stages do not divide."""
    model: Any = placed.model
    config, mesh, layouts, precision = placed.config, placed.mesh, placed.layouts, placed.precision
    stages, chunks = mesh.shape[PIPE], config.pipeline.chunks
    _check_options(model, config, mesh)
    asked = Remat.resolve(config, model, False, mesh)
    section = ActivationCheckpointing(policy="full", cpu_checkpointing=asked.offload)
    remat = Remat(section, asked.interval, regather=False)
    stacked = isinstance(model, StackModel)
    whole = unrolled(layouts) if stacked else scanned(layouts)
    view = StackView(  # one tree, where the executor expects a list of layers
        {ENDS: {}, STACK: [whole.layouts]},
        lambda params: {ENDS: {}, STACK: [whole.split(params)]},
        lambda gradients: whole.merge(gradients[STACK][0]),
        layer_axis=False,
    )
    boundaries = model.boundaries(stages * chunks)

    def functions(pairs: PyTree, part: PyTree) -> Functions:
        def everything(weights: PyTree) -> PyTree:
            return fetch_params(whole.layouts, tuple(tree[0] for tree in weights), precision)  # type: ignore[arg-type]

        params = jax.eval_shape(lambda: everything([pair[STACK] for pair in pairs]))
        pack, run, loss = switched(model, boundaries, params, part, is_state(whole.layouts), remat.offload)

        def chunk(weights: PyTree, state: PyTree, x: PyTree, context: PyTree) -> PyTree:
            (diff, nondiff), (key, number) = weights, context
            params = everything((diff, replace_state(nondiff, state)))
            x, new = run(params, x, number, key)
            return x, [new]

        return (lambda ends, part, key: (pack(part), {})), chunk, (lambda ends, x, part, key: (loss(x, part, key), {}))

    def owned(state: PyTree) -> PyTree:
        def of_its_stage(path: tuple, x: jax.Array) -> jax.Array:
            stage = (bisect_right(boundaries, model.layer_index(path_name(path))) - 1) % stages
            return lax.psum(jnp.where(lax.axis_index(PIPE) == stage, x, jnp.zeros_like(x)), PIPE).astype(x.dtype)

        return {**state, STACK: [jax.tree_util.tree_map_with_path(of_its_stage, state[STACK][0])]}

    length = stack_length(layouts) if stacked else 0
    why = "no run of equal layers holds half of the parameters"
    if stacked:
        why = f"stages x chunks = {stages * chunks} does not divide the {length} equal layers"
    interval = ", in one piece whatever activation_checkpoint_interval says" if asked.interval > 1 else ""
    fallback = (
        f"pipeline: {why}, so every stage has all parameters and the sum of their gradients, and computes its "
        f"layers again in the backward pass{interval}"
    )
    facts = PassFacts(remat, length, unrolled=stacked, fallback=fallback)
    return Cut(view, functions, facts, f"layers cut at {boundaries}, each stage switches to its own", owned=owned)


def _check_options(model: PipelineModule, config: Config, mesh: Mesh) -> None:
    """Raise a ConfigError for options that stages without a stack do not support."""
    stages = mesh.shape[PIPE]
    if axes := present(mesh, *GROUP_AXES):
        raise ConfigError(
            f"{degrees_text(mesh, axes)} with mesh.pipe = {stages} and layers of {model!r} that do not form a stack "
            "divisible by the stages: not yet supported; give more of the layers the same structure, choose a number "
            "of stages that divides them, or leave one out"
        )
    section, always = (
        config.activation_checkpointing,
        "layers that do not form a stack divisible by the stages are always",
    )
    policy = section.policy if section else None
    refused = {
        "fp8.enabled = true": (config.fp8.enabled, "fp8 multiplies the weights of a stack divisible by the stages"),
        f'activation_checkpointing.policy = "{policy}"': (policy in ("matmuls", "none"), f"{always} recomputed"),
        "stack.unroll = false": (config.stack.unroll is False, f"{always} unrolled"),
    }
    for key, (asked, why) in refused.items():
        if asked:
            raise ConfigError(f"{key} with mesh.pipe = {stages}: {why}; leave it out")


def switched(
    model: PipelineModule,
    boundaries: Sequence[int],
    params: PyTree,
    inputs: Inputs,
    is_state: PyTree,
    offload: bool = False,
) -> tuple[Pack, Callable, Callable]:
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
    def chunk(params: PyTree, x: Buffers, part: jax.Array, rng: jax.Array | None) -> PyTree:
        x = as_input(x)

        def branch(p: int) -> PyTree:
            y, new = run[p](params, x=unpack(x, trees[p]), rng=rng)
            return pack(y), replace_state(partition(params, is_state)[0], new)  # of all layers, whatever the branch

        return jax.lax.switch(part, [partial(branch, p) for p in range(len(run))])

    def suffix(x: Buffers, inputs: Inputs, rng: jax.Array | None) -> PyTree:
        return model.end(unpack(x, trees[-1]), inputs.batch, inputs.extra)

    return lambda inputs: pack(inputs_and_labels(inputs.batch)[0]), chunk, suffix


def _packing(trees: Sequence[PyTree]) -> tuple[Pack, Unpack]:
    """Make `pack(tree) -> buffers` and `unpack(buffers, shapes) -> tree`, with room for any of the `trees`."""
    layout: dict[str, tuple[np.dtype, int]] = {}  # kind -> dtype, length
    for kind in ("float", "other"):
        leaves = [[leaf for leaf in jax.tree.leaves(tree) if buffer_kind(leaf) == kind] for tree in trees]
        if dtypes := {leaf.dtype for some in leaves for leaf in some}:
            wide = jnp.int64 if any(dtype.itemsize > 4 for dtype in dtypes) else jnp.int32
            dtype = reduce(jnp.promote_types, dtypes) if kind == "float" else wide
            layout[kind] = dtype, max(sum(leaf.size for leaf in some) for some in leaves)

    def pack(tree: PyTree) -> Buffers:
        buffers = {}
        for kind, (dtype, length) in layout.items():
            flat = [leaf.astype(dtype).reshape(-1) for leaf in jax.tree.leaves(tree) if buffer_kind(leaf) == kind]
            buffers[kind] = jnp.concatenate([*flat, jnp.zeros(length - sum(map(len, flat)), dtype)])
        return buffers

    def unpack(buffers: Buffers, shapes: PyTree) -> PyTree:
        used = dict.fromkeys(layout, 0)

        def take(leaf: PyTree) -> jax.Array:
            kind = buffer_kind(leaf)
            start = used[kind]
            used[kind] += leaf.size
            return buffers[kind][start : used[kind]].reshape(leaf.shape).astype(leaf.dtype)

        return jax.tree.map(take, shapes)

    return pack, unpack
