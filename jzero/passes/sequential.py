"""The passes over a device's micro-batches one after the other, with all layers on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.kernels.fusion.parts import has_triton
from jzero.layout import storage
from jzero.layout.sharding import PlacedModel, stack_length
from jzero.loss import Mean, Sums, read_loss, read_sums, weighted
from jzero.model import (
    ENDS,
    STACK,
    WHOLE,
    Inputs,
    Model,
    StackModel,
    fold,
    replace_state,
    stack_functions,
    suffix_key,
    uniform,
)
from jzero.passes.remat import Remat, checkpointed
from jzero.passes.stack import (
    StackView,
    fetch_params,
    joint_backward,
    map_present,
    ordered_backward,
    run_stack,
    scanned,
    unrolled,
    unrolls,
)
from jzero.precision import Precision
from jzero.spread.spread_model import on_group
from jzero.tracing.chunk import split_floats
from jzero.tracing.fused import fused
from jzero.tree import PyTree, combine, leading_dim

Read = Callable[[Any], PyTree]  # what a model returned for a micro-batch -> what is collected of it


@dataclass(frozen=True)
class PassFacts:
    """Facts of the passes, for the run report and the planner.

    Attributes:
      layers: in the layer stack; 0: the model has no stack.
      unrolled: whether they are unrolled.
      by_layer: whether ZeRO-3 gathers one layer at a time.
      always_sums: whether even a single micro-batch's gradient goes into a sum.
      layers_per_checkpoint: layers in one activation checkpoint.
      pipeline: (micro-batches in a step) -> the line of the report about the pipeline.
      fallback: the pipeline's avoidable extra cost, and its cause.
    """

    remat: Remat
    layers: int = 0
    unrolled: bool = False
    by_layer: bool = False
    always_sums: bool = False
    layers_per_checkpoint: int = 1
    pipeline: Callable[[int], str] | None = field(default=None, repr=False)
    fallback: str = ""


class DeviceWeights(NamedTuple):
    """A device's part of the parameters in the form that the passes use; each has None in the others' places.

    `layout.storage` explains `diff` and `nondiff`; `state` is what a forward pass replaces; `extra` is the caller's
    (`jzero.model`).
    """

    diff: PyTree
    nondiff: PyTree
    state: PyTree
    extra: PyTree = None


class Passes(NamedTuple):
    """The forward and backward passes over a device's micro-batches: in sequence here, interleaved in a pipeline.

    Attributes:
      gradients: (weights, batch [accum, micro, ...], key, cotangents, index of the first) -> (gradient of the losses'
        sums and counts times their cotangents with respect to diff; the loss and metrics of every micro-batch, `Sums`
        [accum, 2]; the new state).
      losses: (weights, batch, key or None, index of the first) -> `Sums` [accum, 2], or what `read` makes of the
        model's results, [accum, ...].
    """

    view: StackView
    facts: PassFacts
    gradients: Callable
    losses: Callable


def sequential(placed: PlacedModel, read: Read | None = None) -> Passes:
    """Make the passes that run one micro-batch after the other, with all layers on every device.

    Args:
      read: reads what the model returns, for `Passes.losses`; default: the loss and metrics, as `Sums`.
    """
    model, config, layouts, precision = placed.model, placed.config, placed.layouts, placed.precision
    read = read or partial(read_sums, model)
    stack = isinstance(model, StackModel)
    layers = stack_length(layouts) if stack else 0
    regather = any(layout.by_layer for layout in jax.tree.leaves(layouts))
    remat = Remat.resolve(config, model, regather, placed.mesh)
    view = unrolled(layouts) if stack and unrolls(config, layouts, remat) else scanned(layouts)
    make_loss: Callable = _stack_loss if stack else _whole_loss
    spread = on_group(model, placed.mesh, layouts, config.context_parallel.attention, config.fp8.enabled)
    # On a group of devices the rules of `spread` divide what the model wrote.
    alone = spread is model and has_triton(placed.mesh.devices.flat[0])
    kernels: Callable = partial(fused, chains=remat.kind == "none", losses=True) if alone else lambda f: f
    loss = make_loss(spread, layouts, view, remat, precision, kernels)

    def gradients(weights: DeviceWeights, batch: PyTree, key: jax.Array, cotangents: Mean, first: Any = 0) -> Any:
        def micro(i: Any, part: PyTree, state: PyTree) -> tuple[PyTree, Sums, PyTree]:
            def weighted_loss(diff: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
                value, new = loss(
                    weights._replace(diff=diff, state=state), Inputs(part, weights.extra), fold(key, first + i)
                )
                total, sums = weighted(read_loss(model, value), cotangents)
                return total, (sums, new)

            gradient, (sums, new) = jax.grad(weighted_loss, has_aux=True)(weights.diff)
            return gradient, sums, _keep(view.layouts, new, state, view)

        return accumulate(micro, batch, weights.state, weights.diff, precision.accum)

    def losses(weights: DeviceWeights, batch: PyTree, key: jax.Array | None, first: Any = 0) -> Sums:
        def one(item: Any) -> Sums:
            i, part = item
            return read(loss(weights, Inputs(part, weights.extra), fold(key, first + i))[0])

        return lax.map(one, (jnp.arange(leading_dim(batch)), batch))

    facts = PassFacts(remat, layers, unrolled=stack and not view.layer_axis, by_layer=stack)
    return Passes(view, facts, gradients, losses)


def _whole_loss(
    model: Model, layouts: PyTree, view: StackView, remat: Remat, precision: Precision, kernels: Callable
) -> Callable:
    """Make `loss(weights, batch, key)` of a model without a stack: all weights are fetched at once."""
    whole = kernels(uniform(model, model.loss, WHOLE))
    run = checkpointed(lambda pair: fetch_params(layouts, pair, precision), whole, remat, unrolled=True)
    return lambda weights, batch, key: run(_pair(weights), batch, key)


def _stack_loss(
    model: StackModel, layouts: PyTree, view: StackView, remat: Remat, precision: Precision, kernels: Callable
) -> Callable:
    """Make `loss(weights, batch, key)` of prefix, stack and suffix: every layer fetches its own weights."""
    listed = not view.layer_axis
    prefix, block, suffix = stack_functions(model)
    prefix, suffix = kernels(prefix), kernels(suffix)
    if remat.kind != "none" and _has_layers(model):
        run = checkpointed(lambda pair: combine(*pair), prefix, remat, unrolled=True)

        def prefix(ends: DeviceWeights, *rest: Any) -> Any:
            return run(split_floats(ends), *rest)

    fetch_layer = partial(fetch_params, layouts[STACK], precision=precision)
    layer = checkpointed(fetch_layer, ordered_backward(block) if listed else block, remat, unrolled=listed, layer=True)

    def loss(weights: DeviceWeights, batch: PyTree, key: jax.Array | None) -> Any:
        diff, nondiff = _pair(weights)
        layers: Any = (diff[STACK], nondiff[STACK])
        if listed:
            layers = list(zip(*layers, strict=True))
        # Fetched once for prefix and suffix, so tied weights are gathered and reduced once.
        ends = fetch_params(layouts[ENDS], (diff[ENDS], nondiff[ENDS]), precision)
        x, first = prefix(ends, batch, fold(key, 0))
        x, stack = run_stack(layer, layers, x, key)
        # The suffix's gradients of the ends are computed before the layers run backward, not at the end of the step.
        if listed:
            ends, x = joint_backward((ends, x))
        value, last = suffix(replace_state(ends, first), x, batch, suffix_key(model, key, stack_length(layouts)))
        return value, {ENDS: replace_state(first, last), STACK: stack}

    return loss


def _has_layers(model: StackModel) -> bool:
    """Return whether a model has layers in its prefix, whose activations are as large as those of the stack's."""
    make = getattr(model, "make_prefix_cache", None)
    return make is not None and bool(jax.tree.leaves(jax.eval_shape(lambda: make(1, 1, jnp.float32))))


def _pair(weights: DeviceWeights) -> tuple[PyTree, PyTree]:
    """Return (diff, nondiff), with the state among the latter."""
    return weights.diff, replace_state(weights.nondiff, weights.state)


def _keep(layouts: PyTree, new: PyTree, old: PyTree, view: StackView) -> PyTree:
    """Reduce whole new state to what this device stores of it; see `storage.keep_state`."""
    return map_present(view.per_layer(storage.keep_state), layouts, new, old)


def accumulate(gradient: Callable, batch: PyTree, state: PyTree, like: PyTree, dtype: Any) -> tuple[Any, Any, Any]:
    """Sum the gradients of all micro-batches, collect their other results, and pass the state from one to the next.

        for i in range(accum):
            gradients[i], aux[i], state = gradient(i, batch[i], state)
        return sum(gradients), stack(aux), state

    in a scan, so that one micro-batch's activations and one sum are alive.

    Args:
      gradient: (index, micro-batch, state) -> (gradients, aux, new state).
      batch: micro-batches [accum, micro, ...].
      like: a tree with the shapes of the gradients.
      dtype: of the sum. A single micro-batch is not summed and keeps its own dtype.
    """
    accum = leading_dim(batch)
    # Without a sum: it would be one more copy of all gradients, in its dtype, and one more pass over memory.
    if accum == 1:
        gradients, aux, state = gradient(0, jax.tree.map(lambda x: x[0], batch), state)
        return gradients, jax.tree.map(lambda x: x[None], aux), state

    def body(carry: Any, item: Any) -> tuple[Any, Any]:
        summed, state = carry
        gradients, aux, state = gradient(*item, state)
        return (jax.tree.map(lambda s, g: s + g.astype(s.dtype), summed, gradients), state), aux

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), like)
    (summed, state), aux = lax.scan(body, (empty, state), (jnp.arange(accum), batch))
    return summed, aux, state
