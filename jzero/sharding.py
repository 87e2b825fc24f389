"""Where every parameter lies: the layout of a parameter tree, and the PartitionSpecs that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jzero.errors import ConfigError, some_of
from jzero.mesh import PIPE, ZERO, present
from jzero.model import ENDS, STACK
from jzero.tree import path_name
from jzero.zero import STAGES, Leaf, Stage, stage_row


def layout(
    params: Any, *, stage: int, mesh: Mesh, persistence_threshold: int = 0, has_stack: bool = False,
    chunks: int = 1, frozen: Iterable[str] = (), vocabulary: Mapping[str, int] | None = None, gather_once: bool = False,
) -> Any:  # fmt: skip
    """The tree of `Leaf`s for a tree of parameter shapes: the one place where a parameter's layout is decided.

    Args:
      params: shapes and dtypes, as from `jax.eval_shape(model.init, rng)`.
      stage: 0, 1, 2 or 3.
      persistence_threshold: stage 3 leaves smaller than this (elements, per layer) stay replicated.
      has_stack: whether `params["stack"]` is a layer stack; its leading layer axis is never partitioned over `zero`.
      chunks: of the stack on each pipeline stage; a stack that they do not divide lies whole on every stage.
      frozen: regular expressions; a leaf whose name one of them finds is not trained.
      vocabulary: name -> the dimension that `pipe` divides, for leaves of the ends.
      gather_once: stage 3 gathers once a step all the same (as stage 2 does).

    Raises:
      ConfigError: a `frozen` expression that finds no leaf.
    """
    patterns = {p: re.compile(p) for p in frozen}
    unused = set(patterns)

    def leaf(path: tuple, x: Any) -> Leaf:
        name = path_name(path)
        hits = {p for p, regex in patterns.items() if regex.search(name)}
        unused.difference_update(hits)
        stacked = has_stack and name.startswith(STACK + "/")
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ConfigError(
                f"parameter {name!r} is {x.dtype}: only real parameters are trained; keep two real arrays"
            )
        trainable = not hits and jnp.issubdtype(x.dtype, jnp.floating)
        local: list[int] = list(x.shape)
        axes: list[tuple[str, ...]] = [()] * x.ndim  # the mesh axes of every dimension
        divided = (vocabulary or {}).get(name)
        if stacked and x.shape and x.shape[0] % (mesh.shape[PIPE] * chunks) == 0:
            divided = 0
        if divided is not None and present(mesh, PIPE):
            local[divided] //= mesh.shape[PIPE]
            axes[divided] = (PIPE,)
        dim, why = _partitioned_dim(tuple(local[stacked:]), STAGES[stage], mesh, persistence_threshold)
        if dim is not None:
            axes[stacked + dim] += (ZERO,)
        row = STAGES[0] if dim is None else stage_row(stage, gather_once)
        return Leaf(name, tuple(x.shape), _spec(axes), dim, stacked, trainable, row, why)

    leaves = jax.tree_util.tree_map_with_path(leaf, params)
    if unused:
        known = some_of(leaf.name for leaf in jax.tree.leaves(leaves))
        raise ConfigError(f"frozen_parameters: {sorted(unused)} match no parameter; the names are {known}")
    return leaves


def _spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The mesh axes of every dimension as a PartitionSpec, without what says nothing."""
    while axes and not axes[-1]:
        axes = axes[:-1]
    return PartitionSpec(*(one if len(one) > 1 else one[0] if one else None for one in axes))


def _partitioned_dim(shape: tuple[int, ...], stage: Stage, mesh: Mesh, threshold: int) -> tuple[int | None, str]:
    """The first dimension that `zero` divides (a gather along it copies least), or None and why not."""
    group = mesh.shape[ZERO]
    if not stage.shards_state or group == 1:
        return None, ""
    if stage.gather == "layer" and prod(shape) < threshold:
        return None, f"under stage3_param_persistence_threshold {threshold}"
    for dim, size in enumerate(shape):
        if size and size % group == 0:
            return dim, ""
    return None, f"no dimension of {shape} is a multiple of {group}"


def stack_length(leaves: Any) -> int:
    """The number of layers of a stacked model.

    Raises:
      ConfigError: no stack among the parameters, or leaves that disagree on its length.
    """
    if not isinstance(leaves, dict) or set(leaves) != {ENDS, STACK}:
        found = sorted(leaves) if isinstance(leaves, dict) else type(leaves).__name__
        raise ConfigError(
            f"a model with prefix, block, suffix has params {{{ENDS!r}, {STACK!r}}}; init(rng) gave {found}"
        )
    lengths = {leaf.shape[:1]: leaf.name for leaf in jax.tree.leaves(leaves[STACK])}
    if len(lengths) != 1 or () in lengths:
        found = ", ".join(f"{name} {shape or 'a scalar'}" for shape, name in lengths.items())
        raise ConfigError(
            f"params[{STACK!r}]: every leaf has the layer axis first, all of one length; found {found}; "
            "stack the blocks with nnx.vmap, as models/llama.py does"
        )
    return next(iter(lengths))[0]


def optimizer_leaves(opt_state: Any, leaves: Any) -> Any:
    """For each leaf of the optimizer state the `Leaf` of the parameter that it belongs to, or False.

    It belongs to one, and lies as that does, if its key path ends with the parameter's and the shapes agree; whatever
    else there is (step counters, factored moments) is replicated.
    """
    known = {tuple(filter(None, leaf.name.split("/"))): leaf for leaf in jax.tree.leaves(leaves)}

    def owner(path: tuple, x: Any) -> Leaf | Literal[False]:
        keys = tuple(path_name(path).split("/"))
        for start in range(len(keys) + 1):
            leaf = known.get(keys[start:])
            if leaf is not None:
                return leaf if leaf.shape == tuple(x.shape) else False
        return False

    return jax.tree_util.tree_map_with_path(owner, opt_state)


def specs(leaves: Any) -> Any:
    """The tree of PartitionSpecs of parameters, masters and reduced gradients, or of the optimizer's leaves."""
    return jax.tree.map(lambda leaf: leaf.spec if leaf else PartitionSpec(), leaves)
