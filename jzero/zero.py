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

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jzero.mesh import DATA, PIPE, ZERO, present
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
