"""ZeRO as a table: what each stage partitions, when it gathers, when it reduces.

| stage | masters, moments | gather (compute dtype)      | gradients over `zero`                            |
|-------|------------------|-----------------------------|--------------------------------------------------|
| 0     | replicated       | -                           | summed locally, one all-reduce a step            |
| 1     | `zero`           | once a step                 | summed locally, one reduce-scatter a step        |
| 2     | `zero`           | once a step                 | reduce-scatter every micro-batch, summed sharded |
| 3     | `zero`           | every layer, forward + back | reduce-scatter every micro-batch, summed sharded |

Over `data` the gradients are all-reduced once a step, at every stage. (Rajbhandari et al., 2020, arXiv:1910.02054;
with `data` > 1 this is MiCS / HSDP, arXiv:2205.00119.)

`pipe` divides the layer stack, and the vocabulary of a language model's ends, so nothing is gathered over it. What it
does not divide lies on every pipeline stage, and its gradient is all-reduced over `pipe` once a step.

Everything below the table runs inside one `jax.shard_map` that is manual over the whole mesh, so a parameter
is a local shard, `all_gather` is the gather and its transpose is the reduce-scatter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jzero.errors import ConfigError, some_of
from jzero.mesh import DATA, PIPE, ZERO, present
from jzero.model import ENDS, STACK
from jzero.precision import Precision


class Stage(NamedTuple):
    """One row of the table."""

    shards_state: bool
    gather: Literal["step", "layer"] | None
    scatter: Literal["step", "micro_batch"] | None  # None: an all-reduce, once a step


STAGES = {
    0: Stage(False, None, None),
    1: Stage(True, "step", "step"),
    2: Stage(True, "step", "micro_batch"),
    3: Stage(True, "layer", "micro_batch"),
}


def stage_row(stage: int, gather_once: bool = False) -> Stage:
    """The row of a stage; `gather_once`: with stage 2's gather where the stage has a later one."""
    row = STAGES[stage]
    return row._replace(gather="step") if row.gather and gather_once else row


@dataclass(frozen=True)
class Leaf:
    """Where one parameter lies, and the master, moments and reduced gradient with it.

    `dim` is the dimension partitioned over `zero` (of the layer's slice if the leaf is stacked), None if the
    leaf is replicated, and then `why` says for what reason. `row` is the row of the table that the leaf follows: the
    stage's if it is partitioned, row 0 if not.
    """

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    dim: int | None
    stacked: bool
    trainable: bool
    row: Stage
    why: str = ""

    @property
    def on_pipe(self) -> bool:
        """Whether every pipeline stage has its own part."""
        return any(PIPE in (axes if isinstance(axes, tuple) else (axes,)) for axes in self.spec)


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


def path_name(path: tuple) -> str:
    """A key path as text: `stack/attention/wo/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named(tree: Any) -> dict[str, Any]:
    """name -> leaf, in the tree's order.

    Raises:
      ConfigError: two leaves of one name, as of {"a/b": ..., "a": {"b": ...}}.
    """
    leaves = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if len(result := dict(leaves)) < len(leaves):
        twice = sorted({name for name, _ in leaves if [n for n, _ in leaves].count(name) > 1})
        raise ConfigError(f"two leaves have the name {some_of(twice)}: a key must not hold a /")
    return result


def differences(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    """How named shapes differ from what is wanted (None: any shape), to say so.

    >>> differences({"a": (4,), "b": (2, 3)}, {"a": (8,), "c": (2, 3)})
    ['missing c (2, 3)', 'extra b (2, 3)', 'a is (4,), not (8,)']
    """
    missing = [
        f"missing {name}" + (f" {shape}" if shape is not None else "")
        for name, shape in wanted.items()
        if name not in found
    ]
    extra = [f"extra {name} {shape}" for name, shape in sorted(found.items()) if name not in wanted]
    others = [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if shape is not None and found.get(name, shape) != shape
    ]
    return missing + extra + others


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


def partition(leaves: Any, tree: Any) -> tuple[Any, Any]:
    """(trainable, frozen): the tree twice, with None in the other's places."""
    trainable = jax.tree.map(lambda leaf, x: x if leaf.trainable else None, leaves, tree)
    frozen = jax.tree.map(lambda leaf, x: None if leaf.trainable else x, leaves, tree)
    return trainable, frozen


def combine(leaves: Any, trainable: Any, frozen: Any) -> Any:
    """The inverse of `partition`."""
    return jax.tree.map(lambda leaf, t, f: t if leaf.trainable else f, leaves, trainable, frozen)


# ---------------------------------------------------------------- inside the manual region, one leaf at a time
#
# A parameter in use is a pair (active, passive): the gradient is taken with respect to `active`, `passive` comes along.
#
#   row | active                  | passive                 | `fetch` gives, and its transpose does
#   ----|-------------------------|-------------------------|------------------------------------------------------
#   0   | the whole weight        | -                       | active
#   1   | the whole weight        | -                       | active (reduced by `reduce_gradient`, after the sum)
#   2   | the shard               | the whole weight        | passive; reduce-scatters into the shard's gradient
#   3   | the shard               | -                       | a gather of active; reduce-scatters
#   a frozen leaf: active None, passive the whole weight (rows 0 to 2) or the shard (row 3)


def prepare(leaf: Leaf, master: jax.Array, precision: Precision) -> tuple[Any, Any]:
    """Local master (or a layer's slice of it) -> (active, passive); gathers what is gathered once a step."""
    if not jnp.issubdtype(master.dtype, jnp.floating):
        return None, _gather(leaf, master) if leaf.row.gather == "step" else master
    shard = master.astype(precision.compute)
    whole = _gather(leaf, shard) if leaf.row.gather == "step" else shard
    if not leaf.trainable:
        return None, whole
    if leaf.row.scatter != "micro_batch":
        return whole, None
    # Wide enough for the weight that is computed with and for the reduced gradient that comes back.
    active = master.astype(jnp.promote_types(precision.compute, precision.reduce))
    return active, (whole if leaf.row.gather == "step" else None)


def fetch(leaf: Leaf, active: Any, passive: Any, precision: Precision) -> jax.Array:
    """(active, passive) -> the whole weight, where it is used. Its transpose reduces as the table says."""
    if not leaf.trainable:
        return _gather(leaf, passive) if leaf.row.gather == "layer" else passive
    if leaf.row.scatter != "micro_batch":
        return active

    @jax.custom_vjp
    def use(shard: jax.Array, whole: jax.Array | None) -> jax.Array:
        return _gather(leaf, shard.astype(precision.compute)) if whole is None else whole

    def forward(shard: jax.Array, whole: jax.Array | None) -> tuple[jax.Array, None]:
        return use(shard, whole), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, None]:
        return _scatter(leaf, gradient.astype(precision.reduce)).astype(active.dtype), None

    use.defvjp(forward, backward)
    return use(active, passive)


def reduce_gradient(leaf: Leaf, gradient: jax.Array, mesh: Mesh, precision: Precision) -> jax.Array:
    """Accumulated gradient -> the gradient of the local master: the reductions that happen once a step."""
    if leaf.row.scatter == "step":
        gradient = _scatter(leaf, gradient.astype(precision.reduce))
    axes = present(mesh, *[PIPE] * (not leaf.on_pipe), DATA, *[ZERO] * (not leaf.row.scatter))
    return lax.psum(gradient.astype(precision.reduce), axes) if axes else gradient


def _gather(leaf: Leaf, shard: jax.Array) -> jax.Array:
    return lax.all_gather(shard, ZERO, axis=leaf.dim, tiled=True)


def _scatter(leaf: Leaf, gradient: jax.Array) -> jax.Array:
    return lax.psum_scatter(gradient, ZERO, scatter_dimension=leaf.dim, tiled=True)
