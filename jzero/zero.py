"""ZeRO as a table: what each stage partitions, and when it gathers and reduces.

| stage | masters, moments | gather (compute dtype)      | gradients over `zero`                            |
|-------|------------------|-----------------------------|--------------------------------------------------|
| 0     | replicated       | -                           | summed locally, one all-reduce a step            |
| 1     | `zero`           | once a step                 | summed locally, one reduce-scatter a step        |
| 2     | `zero`           | once a step                 | reduce-scatter every micro-batch, summed sharded |
| 3     | `zero`           | every layer, forward + back | reduce-scatter every micro-batch, summed sharded |

The devices along `expert` and `context` are members of the ZeRO group too: `zero` above is (`zero`, `expert`,
`context`). Over `data` the gradients are all-reduced once a step, at every stage. (Rajbhandari et al., 2020,
arXiv:1910.02054; with `data` > 1 this is MiCS / HSDP, arXiv:2205.00119.) `communication.zeropp` has cheaper collectives
for stage 3.

`pipe` divides the layer stack and the vocabulary of a language model's ends, so nothing is gathered over it. A
parameter that `pipe` does not divide is stored on every stage; its gradient is all-reduced over `pipe` once a step.

`tensor` and `expert` divide the parameters that a table names (`jzero.spread`), and a divided one is used as it is,
never gathered over them. One rule holds for all axes: once a step a gradient is summed over every axis that does not
divide its parameter.

`prepare`, `fetch` and `reduce_gradient` do this for one parameter. They run inside one `jax.shard_map` that is manual
over the whole mesh: a parameter is a local shard, `all_gather` is the gather, its transpose is the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jzero.communication import zeropp
from jzero.fp8 import history
from jzero.fp8.quantized import Quantized, quantize_weight
from jzero.mesh import AXES, BATCH_AXES, PIPE, ZERO_AXES, present
from jzero.precision import Precision, cast


class Rule(NamedTuple):
    """One row of the table: how a stage treats a parameter; `plus` changes how stage 3 moves it."""

    shards_state: bool
    gather: Literal["step", "layer"] | None
    scatter: Literal["step", "micro_batch"] | None  # None: an all-reduce, once a step
    plus: zeropp.Plus = zeropp.NOTHING


RULES = {
    0: Rule(False, None, None),
    1: Rule(True, "step", "step"),
    2: Rule(True, "step", "micro_batch"),
    3: Rule(True, "layer", "micro_batch"),
}


def stage_rule(stage: int, gather_once: bool = False, plus: zeropp.Plus = zeropp.NOTHING) -> Rule:
    """Return the rule of a ZeRO stage; with `gather_once` stage 3 gathers once a step, as stage 2 does."""
    rule = RULES[stage]._replace(plus=plus)
    return rule._replace(gather="step") if rule.gather and gather_once else rule


class OnHost(NamedTuple):
    """Which parts of a parameter's state live in host memory, see `jzero.offload.choice`.

    Attributes:
      master: the master, or a frozen parameter.
      moments: the optimizer's state of it.
      in_use: the weight stays there inside a step; each layer's comes to the device where the layer runs.
    """

    master: bool = False
    moments: bool = False
    in_use: bool = False


ON_DEVICE = OnHost()


@dataclass(frozen=True)
class ParamLayout:
    """The placement of one parameter, shared by its master, moments and reduced gradient.

    Attributes:
      name: as in `tree.named`.
      shape: global.
      spec: over the mesh.
      dim: the dimension that ZeRO partitions (of one layer's slice if the parameter is stacked); None: replicated.
      stacked: whether the leading dimension is the layer axis of a layer stack.
      trainable: whether it has a gradient.
      state: whether the forward pass replaces it; it is not trained then, and keeps its dtype.
      rule: the stage's rule if the parameter is partitioned, rule 0 if it is replicated. A frozen parameter follows
        rule 3 or rule 0.
      why: why the stage's rule does not apply; empty if it does.
      on_host: which parts of its state live in host memory.
      divided: (axis, dimension of one layer's slice) that a table names: so it is divided while it is used, too.
    """

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    dim: int | None
    stacked: bool
    trainable: bool
    rule: Rule
    why: str = ""
    state: bool = False
    on_host: OnHost = ON_DEVICE
    divided: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> set[str]:
        """The mesh axes that divide it."""
        return {axis for axes in self.spec for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis}

    @property
    def group(self) -> tuple[str, ...]:
        """The axes over which ZeRO partitions it."""
        return tuple(axis for axis in ZERO_AXES if axis in self.axes and axis not in dict(self.divided))

    @property
    def held(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension (of one layer's slice) the axes that divide it while it is used."""
        dims = range(len(self.shape) - self.stacked)
        return tuple(tuple(axis for axis, dim in self.divided if dim == d) for d in dims)

    @property
    def by_layer(self) -> bool:
        """Whether a layer's weight comes where the layer runs: gathered, or copied from the host."""
        return self.rule.gather == "layer" or self.on_host.in_use

    @property
    def on_pipe(self) -> bool:
        """Whether every pipeline stage holds its own part."""
        return PIPE in self.axes


# Inside the step a parameter is a pair (diff, nondiff): the gradient is taken with respect to `diff`, `nondiff` is
# carried along. The rule decides what the two are:
#
#   rule | diff             | nondiff          | `fetch` returns, and what its transpose does to the gradient
#   -----|------------------|------------------|----------------------------------------------------------------
#   0    | the whole weight | -                | diff; nothing
#   1    | the whole weight | -                | diff; nothing (`reduce_gradient` reduce-scatters the sum)
#   2    | the shard        | the whole weight | nondiff; reduce-scatters into the shard's gradient
#   3    | the shard        | -                | diff, gathered; reduce-scatters
#   host | zeros            | the master there | nondiff, copied to the device, then as rule 3
#   hpZ  | the shard        | the second copy  | nondiff, gathered in its group; reduce-scatters into diff's gradient
#   fp8  | zeros            | a `Quantized`    | nondiff, gathered by the rule; reduces into diff's gradient by the rule
#
# With fp8.recipe "delayed" these zeros are `history.Places`.
# Under rule 2, hpZ, on the host and in fp8 diff is only the place where the gradient arrives. A frozen parameter has no
# diff; it is kept in the compute dtype, and nondiff is the weight as stored, whole (rule 0) or the shard (rule 3), or
# the second copy.


def prepare(
    layout: ParamLayout, master: jax.Array, precision: Precision, fp8: Any = None, maxima: jax.Array | None = None
) -> tuple[Any, Any]:
    """Convert a local master (or one layer's slice of it) to (diff, nondiff); gather it under rules 1 and 2.

    Args:
      fp8: the fp8 dtype of gradients, if the weight is multiplied in fp8. The shard is cast before any gather.
      maxima: the history of this layer, if it decides the scales; see `fp8.history`.
    """
    if layout.state:
        return None, master
    gradient_dtype = jnp.promote_types(precision.compute, precision.reduce)
    if fp8 is not None:
        known = None if maxima is None else history.scales(maxima, fp8)
        stored = quantize_weight(master, (*layout.group, *dict(layout.divided)), precision.compute, fp8, known)
        x8 = _gather(layout, stored.x8) if layout.rule.gather == "step" else stored.x8
        x8 = _secondary(layout, x8) if layout.rule.plus.secondary else x8
        by_micro_batch = layout.rule.scatter == "micro_batch"
        shape, dtype = (master.shape, gradient_dtype) if by_micro_batch else (x8.shape, precision.compute)
        diff: Any = jnp.zeros(shape, dtype) if layout.trainable else None
        return diff if known is None else history.Places(diff, history.places()), replace(stored, x8=x8)
    if layout.on_host.in_use:
        return (jnp.zeros(master.shape, gradient_dtype) if layout.trainable else None), master
    if not layout.trainable:
        stored = cast(master, precision.compute)  # a no-op, unless the caller put another dtype into the state
        return None, (_secondary(layout, stored) if layout.rule.plus.secondary else stored)
    shard = master.astype(precision.compute)
    whole = _gather(layout, shard) if layout.rule.gather == "step" else shard
    if layout.rule.scatter != "micro_batch":
        return whole, None
    # The gradient has diff's dtype, which must be wide enough for the compute weight and the reduced gradient.
    diff = master.astype(gradient_dtype)
    if layout.rule.plus.secondary:
        return diff, _secondary(layout, shard)
    return diff, (whole if layout.rule.gather == "step" else None)


def fetch(layout: ParamLayout, diff: Any, nondiff: Any, precision: Precision) -> Any:
    """Return the whole weight where the model uses it; the transpose reduces its gradient by the rule."""
    if isinstance(nondiff, Quantized):
        x8 = _use(layout, nondiff.x8)
        place = seen = None
        if nondiff.delayed is not None:
            diff, seen = diff
        if layout.trainable:
            place = _reducing(layout, lambda *_: jnp.zeros(x8.shape, precision.compute), diff, None, precision)
        return nondiff.used(x8, place, seen)
    if not layout.trainable:
        return _use(layout, to_device(nondiff) if layout.on_host.in_use else nondiff)

    def whole(shard: jax.Array, kept: jax.Array | None) -> jax.Array:
        if layout.on_host.in_use:
            kept = to_device(kept).astype(precision.compute)
        return _use(layout, shard.astype(precision.compute) if kept is None else kept)

    return _reducing(layout, whole, diff, nondiff, precision)


def _reducing(layout: ParamLayout, whole: Callable, diff: jax.Array, nondiff: Any, precision: Precision) -> jax.Array:
    """Return whole(diff, nondiff), and reduce its gradient into that of diff by the rule.

    JAX's own transpose does not fit: the gradient is reduced in `precision.reduce`, whatever the weight's dtype, and
    rule 2 takes the value from one array and gives the gradient to another.
    """
    if layout.rule.scatter != "micro_batch" and not layout.on_host.in_use:
        return diff
    use = jax.custom_vjp(whole)

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, None]:
        if layout.rule.plus.gradients:
            return zeropp.reduce_scatter(gradient, _dim(layout), layout.rule.plus).astype(diff.dtype), None
        if layout.rule.scatter == "micro_batch":
            gradient = _scatter(layout, gradient.astype(precision.reduce))
        return gradient.astype(diff.dtype), None

    use.defvjp(lambda diff, nondiff: (whole(diff, nondiff), None), backward)
    return use(diff, nondiff)


def reduce_gradient(layout: ParamLayout, gradient: jax.Array, mesh: Mesh, precision: Precision) -> jax.Array:
    """Apply the once-a-step reductions: turn an accumulated gradient into the gradient of the local master."""
    if layout.rule.scatter == "step":
        gradient = _scatter(layout, gradient.astype(precision.reduce))
    axes = tuple(axis for axis in present(mesh, *AXES) if axis not in layout.axes)
    return lax.psum(gradient.astype(precision.reduce), axes) if axes else gradient


def keep_state(layout: ParamLayout, new: jax.Array, old: jax.Array) -> jax.Array:
    """Turn a state that every replica of the ZeRO group computed whole into what this device stores of it."""
    new = new.astype(old.dtype)
    if layout.dim is None:
        return new
    if jnp.issubdtype(new.dtype, jnp.floating):
        return _scatter(layout, new / lax.psum(1, layout.group))
    new = _first(new, layout.group)
    size = old.shape[layout.dim]
    return lax.dynamic_slice_in_dim(new, lax.axis_index(layout.group) * size, size, layout.dim)


def agree_on_state(layout: ParamLayout, new: jax.Array, mesh: Mesh) -> jax.Array:
    """Make the replicas that store a state agree: on the mean of floats, else on the first replica's value."""
    axes = tuple(axis for axis in present(mesh, *BATCH_AXES) if axis not in layout.group)
    if not axes:
        return new
    return lax.pmean(new, axes) if jnp.issubdtype(new.dtype, jnp.floating) else _first(new, axes)


def _first(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Broadcast the first device's integers or bools along the axes; random keys are the same on all."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    # A psum of integers, beside those of floats, ended in a segmentation fault on CPUs (jaxlib 0.10.2).
    return lax.all_gather(x, axes)[0]


def to_device(x: Any) -> jax.Array:
    """Copy an array of host memory to the device."""
    return jax.device_put(x, jax.memory.Space.Device)


def _use(layout: ParamLayout, kept: jax.Array) -> jax.Array:
    """Return the whole weight from what is kept of it: all of it, a part of its second copy, or the shard."""
    if layout.rule.gather != "layer":
        return kept
    if layout.rule.plus.secondary:
        return zeropp.gather_secondary(kept, _dim(layout), layout.rule.plus)
    return _gather(layout, kept)


def _secondary(layout: ParamLayout, shard: jax.Array) -> jax.Array:
    return zeropp.secondary(shard, _dim(layout), layout.rule.plus)


def _gather(layout: ParamLayout, shard: jax.Array) -> jax.Array:
    return zeropp.gather(shard, _dim(layout), layout.rule.plus, layout.group)


def _dim(layout: ParamLayout) -> int:
    assert layout.dim is not None  # noqa: S101  # only partitioned parameters are gathered
    return layout.dim


def _scatter(layout: ParamLayout, gradient: jax.Array) -> jax.Array:
    return lax.psum_scatter(gradient, layout.group, scatter_dimension=layout.dim, tiled=True)
