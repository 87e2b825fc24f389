"""The table of storages: how a parameter is kept while a step runs, and how its gradient comes back.

    storage          | store: keeps of a shard  | use: the whole weight | reduce: a gradient, every micro-batch
    -----------------|--------------------------|-----------------------|---------------------------------------
    replicated       | all                      | as kept               | -
    gathered once    | all, gathered            | as kept               | stage 1: -; stage 2: reduce-scattered
    by layer         | the shard                | gathered              | reduce-scattered
    on the host      | the master there         | copied, then gathered | as the stage does
    second copy, hpZ | a part, from all groups  | gathered in its group | reduce-scattered

What ZeRO++ quantizes it gathers and reduces as codes. A weight in fp8 is a `Quantized`, whose array is kept the same
way. What is not reduced every micro-batch is reduced once a step, by `reduce_gradient`. `zero.naive_gradient` is all
of this for the plain stages.

Inside a step a parameter is a pair (diff, nondiff): the gradient is taken with respect to `diff`; `nondiff` is carried
along. A frozen parameter has no diff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero.kernels.fp8.delayed_scaling import GradientSlots, scales, zero_counts
from jzero.kernels.fp8.quantized import Quantized, quantize_weight
from jzero.layout import zeropp
from jzero.layout.sharding import ParamLayout
from jzero.mesh import AXES, BATCH_AXES, present
from jzero.precision import Precision
from jzero.tree import cast

Function = Callable[[jax.Array], jax.Array]


class Storage(NamedTuple):
    """One row of the table; `reduce` is None where gradients are reduced once a step."""

    store: Function
    use: Function
    reduce: Function | None


def storage(layout: ParamLayout, precision: Precision) -> Storage:
    """Choose the storage of a parameter by its rule."""
    rule, plus = layout.rule, layout.rule.plus
    store: Function = _as_it_is
    use: Function = _as_it_is
    reduce: Function | None = None
    if rule.gather is not None:
        assert layout.dim is not None  # noqa: S101  # only partitioned parameters are gathered
        gather: Function = partial(lax.all_gather, axis_name=layout.group, axis=layout.dim, tiled=True)
        if plus.weights:
            gather = partial(zeropp.gather_weight, dim=layout.dim, plus=plus, group=layout.group)
        store, use = (gather, _as_it_is) if rule.gather == "step" else (_as_it_is, gather)
        if plus.secondary:
            store = partial(zeropp.secondary, dim=layout.dim, plus=plus)
            use = partial(zeropp.gather_secondary, dim=layout.dim, plus=plus)
        if rule.scatter == "micro_batch":
            # In `precision.reduce` whatever the weight's dtype, which the transpose of the gather would not do.
            reduce = lambda g: _scatter(layout, g.astype(precision.reduce))  # noqa: E731
            if plus.gradients:
                reduce = partial(zeropp.reduce_scatter, dim=layout.dim, plus=plus)
    if layout.on_host.in_use:
        gathered = use
        return Storage(store, lambda kept: gathered(cast(to_device(kept), precision.compute)), reduce or _as_it_is)
    return Storage(store, use, reduce)


def store_weight(
    layout: ParamLayout, master: jax.Array, precision: Precision, fp8: Any = None, maxima: jax.Array | None = None
) -> tuple[Any, Any]:
    """Convert a local master (or one layer's slice of it) to (diff, nondiff).

    Args:
      fp8: the fp8 dtype of gradients, if the weight is multiplied in fp8. The shard is cast before any gather.
      maxima: the history of this layer, if it decides the scales; see `fp8.delayed_scaling`.
    """
    if layout.state:
        return None, master  # in its own dtype: statistics are not what a layer multiplies
    store, _, reduce = storage(layout, precision)
    # JAX gives a gradient the shape and dtype of what it is taken with respect to: `diff` is chosen for that. Its dtype
    # must be wide enough for the compute weight and the reduced gradient.
    gradient_dtype = jnp.promote_types(precision.compute, precision.reduce)
    if fp8 is not None:
        # The shard is cast before the gather, which then moves one byte per element. Its scale is that of the whole
        # weight: the maximum is found over all devices that hold a part.
        known = None if maxima is None else scales(maxima, fp8)
        codes = quantize_weight(master, (*layout.group, *dict(layout.divided)), precision.compute, fp8, known)
        x8 = store(codes.x8)
        shape, dtype = (x8.shape, precision.compute) if reduce is None else (master.shape, gradient_dtype)
        diff: Any = jnp.zeros(shape, dtype) if layout.trainable else None
        return diff if known is None else GradientSlots(diff, zero_counts()), replace(codes, x8=x8)
    if layout.on_host.in_use:  # it stays there, in its own dtype
        return jnp.zeros(master.shape, gradient_dtype) if layout.trainable else None, master
    kept = store(cast(master, precision.compute))
    if not layout.trainable:
        return None, kept
    if reduce is None:
        return kept, None
    # Gradients that are reduced every micro-batch have another shape than what is kept: `diff` is then only the place
    # where they arrive (stage 3: the shard itself).
    return master.astype(gradient_dtype), None if store is _as_it_is else kept


def fetch_weight(layout: ParamLayout, diff: Any, nondiff: Any, precision: Precision) -> Any:
    """Return the whole weight where the model uses it; the transpose reduces its gradient by the storage."""
    _, use, reduce = storage(layout, precision)
    if isinstance(nondiff, Quantized):
        x8, place, seen = use(nondiff.x8), None, None
        if nondiff.delayed is not None:
            diff, seen = diff
        if layout.trainable:
            place = _reducing(reduce, lambda *_: jnp.zeros(x8.shape, precision.compute), diff, None)
        return nondiff.used(x8, place, seen)
    if not layout.trainable:
        return use(nondiff)
    return _reducing(reduce, lambda d, kept: use(cast(d, precision.compute) if kept is None else kept), diff, nondiff)


def _reducing(reduce: Function | None, whole: Callable, diff: jax.Array, nondiff: Any) -> jax.Array:
    """Return whole(diff, nondiff), whose gradient becomes, reduced, that of diff."""
    if reduce is None:
        return diff
    # The transpose of the gather would reduce in the weight's dtype. A rule of its own lets the gradient be reduced in
    # `precision.reduce`, as codes, or not at all, whatever moved the weight.
    weight = jax.custom_vjp(whole)
    weight.defvjp(
        lambda diff, nondiff: (whole(diff, nondiff), None),
        lambda _, gradient: (reduce(gradient).astype(diff.dtype), None),
    )
    return weight(diff, nondiff)


def reduce_gradient(layout: ParamLayout, gradient: jax.Array, mesh: Mesh, precision: Precision) -> jax.Array:
    """Apply the once-a-step reductions: turn an accumulated gradient into the gradient of the local master."""
    if layout.rule.scatter == "step":
        gradient = _scatter(layout, gradient.astype(precision.reduce))
    # The one rule of all axes: over what does not divide the parameter every device has a term of its gradient.
    axes = tuple(axis for axis in present(mesh, *AXES) if axis not in layout.axes)
    return lax.psum(gradient.astype(precision.reduce), axes) if axes else gradient


def keep_state(layout: ParamLayout, new: jax.Array, old: jax.Array) -> jax.Array:
    """Turn a state that every replica of the ZeRO group computed whole into what this device stores of it."""
    new = new.astype(old.dtype)
    if layout.dim is None:
        return new
    # The replicas saw different rows: each device keeps its shard of the mean.
    if jnp.issubdtype(new.dtype, jnp.floating):
        return _scatter(layout, new / lax.psum(1, layout.group))
    new = _broadcast_first(new, layout.group)
    size = old.shape[layout.dim]
    return lax.dynamic_slice_in_dim(new, lax.axis_index(layout.group) * size, size, layout.dim)


def agree_on_state(layout: ParamLayout, new: jax.Array, mesh: Mesh) -> jax.Array:
    """Make the replicas that store a state agree: on the mean of floats, else on the first replica's value."""
    # Along the group they store different shards of one mean, see `keep_state`.
    axes = tuple(axis for axis in present(mesh, *BATCH_AXES) if axis not in layout.group)
    if not axes:
        return new
    return lax.pmean(new, axes) if jnp.issubdtype(new.dtype, jnp.floating) else _broadcast_first(new, axes)


def _broadcast_first(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Broadcast the first device's integers or bools along the axes; random keys are the same on all."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    # A psum of integers, beside those of floats, ended in a segmentation fault on CPUs (jaxlib 0.10.2).
    return lax.all_gather(x, axes)[0]


def to_device(x: Any) -> jax.Array:
    """Copy an array of host memory to the device."""
    return jax.device_put(x, jax.memory.Space.Device)


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def _scatter(layout: ParamLayout, gradient: jax.Array) -> jax.Array:
    return lax.psum_scatter(gradient, layout.group, scatter_dimension=layout.dim, tiled=True)
