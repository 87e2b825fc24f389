"""ZeRO as a table: what each stage partitions, and when it gathers and reduces.

| stage | masters, moments | gather (compute dtype)      | gradients over `zero`                            |
|-------|------------------|-----------------------------|--------------------------------------------------|
| 0     | replicated       | -                           | summed locally, one all-reduce a step            |
| 1     | `zero`           | once a step                 | summed locally, one reduce-scatter a step        |
| 2     | `zero`           | once a step                 | reduce-scatter every micro-batch, summed sharded |
| 3     | `zero`           | every layer, forward + back | reduce-scatter every micro-batch, summed sharded |

The devices along `expert` and `context` are members of the ZeRO group too: `zero` above is (`zero`, `expert`,
`context`). Over `data` the gradients are all-reduced once a step, at every stage. (Rajbhandari et al., 2020,
arXiv:1910.02054; with `data` > 1 this is MiCS / HSDP, arXiv:2205.00119.) `layout.zeropp` has cheaper collectives
for stage 3.

`pipe` divides the layer stack and the vocabulary of a language model's ends, so nothing is gathered over it. A
parameter that `pipe` does not divide is stored on every stage; its gradient is all-reduced over `pipe` once a step.

`tensor` and `expert` divide the parameters that a table names (`jzero.spread`), and a divided one is used as it is,
never gathered over them. One rule holds for all axes: once a step a gradient is summed over every axis that does not
divide its parameter.

`naive_gradient` does this for one parameter; `layout.storage` does the same, and adds what a production step needs.
Both run inside one `jax.shard_map` that is manual over the whole mesh: a parameter is a local shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax

from jzero.layout import zeropp
from jzero.mesh import ZERO


class Rule(NamedTuple):
    """One row of the table: how a stage treats a parameter; `plus` changes how stage 3 moves it."""

    shards_state: bool
    # By layer: where the layer runs, and again in its backward pass (`passes.remat`, as `ParamLayout.by_layer` asks).
    # Prefix and suffix, and a model without a layer stack, are gathered whole for each micro-batch.
    gather: Literal["step", "layer"] | None
    scatter: Literal["step", "micro_batch"] | None  # None: an all-reduce, once a step
    plus: zeropp.ZeroPlusPlus = zeropp.NO_ZEROPP


RULES = {
    0: Rule(False, None, None),
    1: Rule(True, "step", "step"),
    2: Rule(True, "step", "micro_batch"),
    3: Rule(True, "layer", "micro_batch"),
}


def stage_rule(stage: int, gather_once: bool = False, plus: zeropp.ZeroPlusPlus = zeropp.NO_ZEROPP) -> Rule:
    """Return the rule of a ZeRO stage; with `gather_once` stage 3 gathers once a step, as stage 2 does."""
    rule = RULES[stage]._replace(plus=plus)
    return rule._replace(gather="step") if rule.gather and gather_once else rule


def naive_gradient(
    stage: int, loss: Callable[[jax.Array, Any], jax.Array], master: jax.Array, micro_batches: Sequence[Any]
) -> jax.Array:
    """Compute a step's gradient of one parameter by the table, in the plainest way.

    Args:
      loss: (the whole parameter, a micro-batch) -> a scalar.
      master: what this device stores: the parameter at stage 0, a slice of its first dimension at the others.
      micro_batches: this device's.

    Returns:
      The gradient of `master`, of the losses' sum over all micro-batches of all devices.
    """

    def gather(shard: jax.Array) -> jax.Array:
        return lax.all_gather(shard, ZERO, tiled=True)

    def scatter(gradient: jax.Array) -> jax.Array:  # sums over the devices, and leaves each its slice
        return lax.psum_scatter(gradient, ZERO, tiled=True)

    weight = gather(master) if stage in (1, 2) else master
    total: Any = 0
    for x in micro_batches:
        if stage == 3:  # the transpose of the gather is the reduce-scatter
            total += jax.grad(lambda shard, x: loss(gather(shard), x))(master, x)
        else:
            gradient = jax.grad(loss)(weight, x)
            total += scatter(gradient) if stage == 2 else gradient
    return lax.psum(total, ZERO) if stage == 0 else scatter(total) if stage == 1 else total
