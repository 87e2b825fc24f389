"""Loss and gradients of one global batch, as one device computes them: the manual region of the train step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero import micro_batches, zero
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.fp8 import history
from jzero.fp8.quantized import GRADIENTS
from jzero.gradient_norm import sums_of_squares
from jzero.loss import LOSS, Sums, means, nonzero, read_loss, read_sums, total, weighted
from jzero.mesh import AXES, BATCH_AXES, PIPE, batch_parts, group_size, present, replicas
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
from jzero.offload import transfers
from jzero.precision import Precision, cast
from jzero.remat import Remat, checkpointed
from jzero.sharding import is_state, stack_length, trainable
from jzero.spread.model import on_group
from jzero.stack import StackView, fetch, in_turn, run_stack, scanned, together, unrolled, unrolls
from jzero.tracing.auto_cast import cast_arrays, inputs_of_products, wide_arrays
from jzero.tracing.fp8_weights import Noted
from jzero.tracing.loss_count import counter
from jzero.tree import PyTree, combine, leading_dim, named, partition
from jzero.zero import ParamLayout

# Scopes: of what counts the elements of the loss before any gradient, and of what is summed once a step.
COUNT, REDUCE = "loss_count", "reduce_gradients"
Read = Callable[[Any], PyTree]  # what a model returned for a micro-batch -> what is collected of it


class Result(NamedTuple):
    """Float32 `gradients` of the local masters, and the sum of the `squares` of each parameter's, whole [parameters];
    loss and metrics as `means` []; every micro-batch's loss [accum]; the new `state` of the model, None in the place of
    parameters; name -> what was `seen` of a weight's products, if the maxima of former steps decide their scales."""

    gradients: PyTree
    squares: jax.Array
    means: Sums
    micro_losses: jax.Array
    state: PyTree
    seen: dict[str, jax.Array]


@dataclass(frozen=True)
class Facts:
    """How the passes run, for the run report and the planner.

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


class Weights(NamedTuple):
    """A device's part of the parameters in the form that the passes use; each has None in the others' places.

    `diff` and `nondiff` are explained in `jzero.zero`; `state` is what a forward pass replaces; `extra` is the
    caller's, see `jzero.model`.
    """

    diff: PyTree
    nondiff: PyTree
    state: PyTree
    extra: PyTree = None


class Passes(NamedTuple):
    """The forward and backward passes over a device's micro-batches: in sequence here, interleaved in a pipeline.

    Attributes:
      gradients: (weights, batch [accum, micro, ...], key, cotangent, index of the first) -> (gradient of cotangent *
        sum of the losses' sums with respect to diff; the loss and metrics of every micro-batch, `Sums` [accum, 2]; the
        new state).
      losses: (weights, batch, key or None, index of the first) -> `Sums` [accum, 2], or what `read` makes of the
        model's results, [accum, ...].
    """

    view: StackView
    facts: Facts
    gradients: Callable
    losses: Callable


def sequential(
    model: Model, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision, read: Read | None = None
) -> Passes:
    """Make the passes that run one micro-batch after the other, with all layers on every device.

    Args:
      read: reads what the model returns, for `Passes.losses`; default: the loss and metrics, as `Sums`.
    """
    read = read or partial(read_sums, model)
    stack = isinstance(model, StackModel)
    layers = stack_length(layouts) if stack else 0
    regather = any(layout.by_layer for layout in jax.tree.leaves(layouts))
    remat = Remat.resolve(config, model, regather, mesh)
    view = unrolled(layouts) if stack and unrolls(config, layouts, remat) else scanned(layouts)
    make_loss: Callable = _stack_loss if stack else _whole_loss
    spread = on_group(model, mesh, layouts, config.context_parallel.attention, config.fp8.enabled)
    loss = make_loss(spread, layouts, view, remat, precision)

    def gradients(weights: Weights, batch: PyTree, key: jax.Array, cotangent: jax.Array, first: Any = 0) -> Any:
        def micro(i: Any, part: PyTree, state: PyTree) -> tuple[PyTree, Sums, PyTree]:
            def weighted_loss(diff: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
                value, new = loss(
                    weights._replace(diff=diff, state=state), Inputs(part, weights.extra), fold(key, first + i)
                )
                total, sums = weighted(read_loss(model, value), cotangent)
                return total, (sums, new)

            gradient, (sums, new) = jax.grad(weighted_loss, has_aux=True)(weights.diff)
            return gradient, sums, _keep(view.layouts, new, state, view)

        return micro_batches.accumulate(micro, batch, weights.state, weights.diff, precision.accum)

    def losses(weights: Weights, batch: PyTree, key: jax.Array | None, first: Any = 0) -> Sums:
        def one(item: Any) -> Sums:
            i, part = item
            return read(loss(weights, Inputs(part, weights.extra), fold(key, first + i))[0])

        return lax.map(one, (jnp.arange(leading_dim(batch)), batch))

    facts = Facts(remat, layers, unrolled=stack and not view.layer_axis, by_layer=stack)
    return Passes(view, facts, gradients, losses)


def _whole_loss(model: Model, layouts: PyTree, view: StackView, remat: Remat, precision: Precision) -> Callable:
    """Make `loss(weights, batch, key)` of a model without a stack: all weights are fetched at once."""
    whole = uniform(model, model.loss, WHOLE)
    run = checkpointed(lambda pair: fetch(layouts, pair, precision), whole, remat, unrolled=True)
    return lambda weights, batch, key: run(_pair(weights), batch, key)


def _stack_loss(model: StackModel, layouts: PyTree, view: StackView, remat: Remat, precision: Precision) -> Callable:
    """Make `loss(weights, batch, key)` of prefix, stack and suffix: every layer fetches its own weights."""
    listed = not view.layer_axis
    prefix, block, suffix = stack_functions(model)
    fetch_layer = partial(fetch, layouts[STACK], precision=precision)
    layer = checkpointed(fetch_layer, in_turn(block) if listed else block, remat, unrolled=listed, layer=True)

    def loss(weights: Weights, batch: PyTree, key: jax.Array | None) -> Any:
        diff, nondiff = _pair(weights)
        layers: Any = (diff[STACK], nondiff[STACK])
        if listed:
            layers = list(zip(*layers, strict=True))
        # Fetched once for prefix and suffix, so tied weights are gathered and reduced once.
        ends = fetch(layouts[ENDS], (diff[ENDS], nondiff[ENDS]), precision)
        x, first = prefix(ends, batch, fold(key, 0))
        x, stack = run_stack(layer, layers, x, key)
        if listed:
            ends, x = together((ends, x))
        value, last = suffix(replace_state(ends, first), x, batch, suffix_key(model, key, stack_length(layouts)))
        return value, {ENDS: replace_state(first, last), STACK: stack}

    return loss


@dataclass(frozen=True)
class ManualRegion:
    """The functions that `jax.shard_map` maps over the mesh: local masters and local batch in, local gradients out."""

    model: Model
    layouts: PyTree
    weights: PyTree  # shapes of the whole weights, in the compute dtype
    passes: Passes
    config: Config
    mesh: Mesh
    precision: Precision
    micro: int
    local: bool = False  # whether the gradients of each device come out, in a row of their own
    fp8: Noted = field(default_factory=Noted)  # takes note of the weights that are cast to fp8

    @property
    def axes(self) -> tuple[str, ...]:
        return present(self.mesh, *BATCH_AXES)

    def gradients(
        self, masters: PyTree, batch: PyTree, extra: PyTree, rng: jax.Array, scale: jax.Array, steps: PyTree = None,
        first: Any = 0, histories: history.Histories | None = None,
    ) -> Result:  # fmt: skip
        """Compute one step's gradients and losses.

        Args:
          masters: the local shards.
          batch: the local batch, leading dimension accum * micro.
          extra: what the caller passed beside the batch, whole; None: nothing.
          rng: this step's key.
          scale: the loss scale.
          steps: what this device adds to the masters, a row of a dimension of its own; None: nothing.
          first: the index of the first micro-batch in the step.
          histories: see `fp8.history`; None: each array's own maximum decides its scale in fp8.
        """
        key = self.replica_key(rng)
        batch = self.split(batch, extra, key)
        weights = self.prepare(self.moved(masters, steps), extra, batch, key, histories)
        with jax.named_scope(COUNT):
            count = self.total_count(weights, batch, key)
        cotangent = scale / count
        if self.config.gradient_allreduce_op == "sum":
            cotangent *= replicas(self.mesh)
        if (devices := group_size(self.mesh)) > 1:
            cotangent /= devices  # they all compute this loss, and gradients arrive as a sum over them
        summed, seen, state = self.passes.gradients(weights, batch, key, cotangent, first)
        summed, noted = history.apart(summed, weights.nondiff)
        # With an infinite scale inf * (1 / inf) = NaN marks the step as overflowed; keep this form.
        unscale = 1 / scale
        reduced = self.reduce(summed)
        gradients = jax.tree.map(lambda g: g * unscale, self.merged(reduced))
        squares = sums_of_squares(
            self.layouts, self.passes.view.layouts, reduced, unscale, self.mesh, self.axes if self.local else None
        )
        seen = self.all_reduce(seen)
        exponents: dict[str, jax.Array] = {}
        if histories:
            axes = present(self.mesh, *(axis for axis in AXES if axis != PIPE))
            exponents = history.total(self.passes.view.merge(noted), histories, axes)
        return Result(gradients, squares, means(total(seen)), means(seen)[LOSS], self.agree(state), exponents)

    def total_count(self, weights: Weights, batch: PyTree, key: jax.Array) -> jax.Array | float:
        """Sum the counts of all micro-batches and replicas, before any gradient is computed."""
        accum = leading_dim(batch)
        first = Inputs(_first(batch), weights.extra)
        count = counter(self.model, self.weights, first, key)
        if isinstance(count, float):
            return count * accum * batch_parts(self.mesh)
        if count is None:  # it depends on the parameters: one more forward pass
            counts = self.passes.losses(weights, batch, key)[LOSS][:, 1]
        else:

            def one(item: Any) -> Any:
                return count(Inputs(item[1], weights.extra), fold(key, item[0]))

            counts = lax.map(one, (jnp.arange(accum), batch))
        return nonzero(self.all_reduce(counts.sum()))

    def evaluate(self, masters: PyTree, batch: PyTree, extra: PyTree) -> Sums:
        """Compute the loss and metrics of the global batch without dropout (rng None)."""
        batch = self.split(batch, extra, None)
        losses = self.passes.losses(self.prepare(masters, extra, batch), batch, None)
        return means(self.all_reduce(total(losses)))

    def predict(self, masters: PyTree, batch: PyTree, extra: PyTree, rng: Any = None, index: Any = 0) -> PyTree:
        """Run a model that returns a row of results for each row of its batch.

        Args:
          rng: the step's key, for the dropout of its micro-batch `index` (and those after it); None: no dropout.
        """
        key = None if rng is None else self.replica_key(rng)
        batch = self.split(batch, extra, key)
        results = self.passes.losses(self.prepare(masters, extra, batch, key), batch, key, index)
        for name, x in named(results).items():
            if x.shape[1:2] != (self.micro,):
                raise ConfigError(
                    f"predictions: {name or 'the result'} has shape {x.shape[1:]} for {self.micro} rows; the leading "
                    "dimension must be the rows"
                )
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    def micro_loss(
        self, masters: PyTree, batch: PyTree, extra: PyTree, rng: jax.Array, index: jax.Array, steps: PyTree = None,
        histories: history.Histories | None = None,
    ) -> jax.Array:  # fmt: skip
        """Compute the loss that `gradients` would report for this micro-batch."""
        key = self.replica_key(rng)
        batch = self.split(batch, extra, key)
        weights = self.prepare(self.moved(masters, steps), extra, batch, key, histories)
        losses = self.passes.losses(weights, batch, key, index)
        return means(self.all_reduce(total(losses)))[LOSS]

    def moved(self, masters: PyTree, steps: PyTree) -> PyTree:
        """Add this device's own steps to the masters."""
        if steps is None:
            return masters
        trained, rest = partition(masters, trainable(self.layouts))
        return combine(jax.tree.map(lambda w, s: (w + s[0]).astype(w.dtype), trained, steps), rest)

    def prepare(
        self, masters: PyTree, extra: PyTree, batch: PyTree = None, key: jax.Array | None = None,
        histories: history.Histories | None = None,
    ) -> Weights:  # fmt: skip
        """Convert local masters to the form that the passes use; see `zero.prepare`.

        Args:
          batch, key: split into micro-batches, whose products show which weights are cast to fp8; None: none is.
          histories: see `gradients`.
        """
        view, section = self.passes.view, self.config.fp8
        read = partial(transfers.read, dtype=self.precision.compute)
        in_fp8: frozenset[str] = frozenset()
        if section.enabled and batch is not None:
            in_fp8 = self.fp8.choose(self.model, self.weights, Inputs(_first(batch), extra), key, section)

        def prepare(layout: ParamLayout, master: jax.Array, former: jax.Array | None) -> tuple[Any, Any]:
            fp8 = GRADIENTS[section.format] if layout.name in in_fp8 else None
            return zero.prepare(layout, master, self.precision, fp8, former if fp8 else None)

        former = jax.tree.map(lambda layout: (histories or {}).get(layout.name), self.layouts)
        parts = view.split(jax.tree.map(read, self.layouts, masters)), view.split(former)
        pairs = jax.tree.map(history.in_turn(view.per_layer(prepare)), view.layouts, *parts)
        diff = jax.tree.map(lambda _, pair: pair[0], view.layouts, pairs)
        nondiff = jax.tree.map(lambda _, pair: pair[1], view.layouts, pairs)
        state, nondiff = partition(nondiff, is_state(view.layouts))
        return Weights(diff, nondiff, state, extra)

    def reduce(self, gradients: PyTree) -> PyTree:
        """Reduce summed gradients to those of the local masters, in the form of the passes; see `zero`."""
        view = self.passes.view
        if self.local:
            return gradients
        reduce = view.per_layer(partial(zero.reduce_gradient, mesh=self.mesh, precision=self.precision))
        with jax.named_scope(REDUCE):
            return _map(reduce, view.layouts, gradients)

    def merged(self, reduced: PyTree) -> PyTree:
        """Return reduced gradients in float32 and in the form of the masters; `local`: in a row of their own."""
        with jax.named_scope(REDUCE):
            merged = cast(self.passes.view.merge(reduced), jnp.float32)
        return jax.tree.map(lambda g: g[None], merged) if self.local else merged

    def agree(self, state: PyTree) -> PyTree:
        """Average the model's new state over the replicas, and return it in the form of the masters."""
        view = self.passes.view
        agree = view.per_layer(partial(zero.agree_on_state, mesh=self.mesh))
        return view.merge(_map(agree, view.layouts, state))

    def split(self, batch: PyTree, extra: PyTree, key: jax.Array | None) -> PyTree:
        """Split the batch into micro-batches, and cast the arrays that `auto_cast` decides on."""
        batch = micro_batches.split(batch, self.micro)
        auto_cast, dtype = self.precision.auto_cast, self.precision.compute
        names: Collection[str] = ()
        if auto_cast == "auto":
            first = Inputs(_first(batch), extra)
            names = inputs_of_products(self.model, self.weights, first, key, dtype)
        elif auto_cast:
            names = wide_arrays(batch, dtype)
        return cast_arrays(batch, names, dtype)

    def replica_key(self, rng: jax.Array) -> jax.Array:
        """Derive a key for every replica, so that their dropout masks differ."""
        return jax.random.fold_in(rng, lax.axis_index(self.axes)) if self.axes else rng

    def all_reduce(self, x: Any) -> Any:
        return lax.psum(x, self.axes) if self.axes else x


def _pair(weights: Weights) -> tuple[PyTree, PyTree]:
    """Return (diff, nondiff), with the state among the latter."""
    return weights.diff, replace_state(weights.nondiff, weights.state)


def _keep(layouts: PyTree, new: PyTree, old: PyTree, view: StackView) -> PyTree:
    """Reduce whole new state to what this device stores of it; see `zero.keep_state`."""
    return _map(view.per_layer(zero.keep_state), layouts, new, old)


def _map(f: Callable, layouts: PyTree, *trees: PyTree) -> PyTree:
    """Map `f(layout, *leaves)`; None where a tree has None."""
    return jax.tree.map(lambda layout, *xs: None if xs[0] is None else f(layout, *xs), layouts, *trees)


def _first(batch: PyTree) -> PyTree:
    """Return the first of the micro-batches."""
    return jax.tree.map(lambda x: x[0], batch)
