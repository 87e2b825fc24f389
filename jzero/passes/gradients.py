"""Loss and gradients of one global batch, as one device computes them: the manual region of the train step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero.errors import ConfigError, some_of
from jzero.kernels.fp8 import delayed_scaling
from jzero.kernels.fp8.quantized import GRADIENTS
from jzero.layout import offload, storage
from jzero.layout.sharding import ParamLayout, PlacedModel, is_state
from jzero.loss import LOSS, Mean, Sums, means, nonzero, total
from jzero.mesh import AXES, BATCH_AXES, PIPE, batch_parts, group_size, present, replicas
from jzero.model import Inputs, fold
from jzero.passes.sequential import DeviceWeights, Passes
from jzero.passes.stack import SMALL, map_present
from jzero.tracing.auto_cast import cast_arrays, inputs_of_products, wide_arrays
from jzero.tracing.fp8_weights import Noted
from jzero.tracing.loss_count import counter
from jzero.tree import PyTree, cast, leading_dim, named, partition

# Scopes: of what counts the elements of the loss before any gradient, and of what is summed once a step.
COUNT, REDUCE = "loss_count", "reduce_gradients"
Parts = Sequence[PyTree]  # a batch: one part with the rows of all micro-batches, by devices; or each micro-batch


class Aside(NamedTuple):
    """The arrays that a step replaces besides the parameters that an optimizer trains.

    Attributes:
      model: the model's state, as BatchNorm's statistics: a tree like the parameters, None in their places.
      fp8: the histories that decide the scales of fp8, by the weight's name.
    """

    model: PyTree
    fp8: delayed_scaling.Histories


class Result(NamedTuple):
    """Float32 `gradients` of the local masters, and the sum of the `squares` of each parameter's, whole [parameters];
    loss and metrics as `means` []; every micro-batch's loss [accum]; what the step puts `aside`, if it is applied."""

    gradients: PyTree
    squares: jax.Array
    means: Sums
    micro_losses: jax.Array
    aside: Aside


def noting_batch(f: Callable) -> Callable:
    """Add the micro-batch to exceptions of the model, which tell of a matmul's shapes or of a key alone."""

    @wraps(f)
    def noted(self: DeviceFunctions, masters: PyTree, parts: Parts, *rest: object) -> object:
        try:
            return f(self, masters, parts, *rest)
        except Exception as error:
            leaves = named(parts[0]).items()
            shapes = [f"{name} {x.dtype}{[self.micro, *x.shape[1:]]}".strip() for name, x in leaves]
            error.add_note(f"while the model was traced with a micro-batch of {some_of(shapes)}")
            raise

    return noted


@dataclass(frozen=True)
class DeviceFunctions:
    """The functions that `jax.shard_map` maps over the mesh: local masters and local batch in, local gradients out."""

    placed: PlacedModel
    weight_shapes: PyTree  # of the whole weights, in the compute dtype
    passes: Passes
    micro: int  # rows
    fp8: Noted  # takes note of the weights that are cast to fp8

    @property
    def axes(self) -> tuple[str, ...]:
        return present(self.placed.mesh, *BATCH_AXES)

    @noting_batch
    def gradients(
        self, masters: PyTree, parts: Parts, extra: PyTree, rng: jax.Array, scale: jax.Array, first: Any = 0,
        histories: delayed_scaling.Histories | None = None,
    ) -> Result:  # fmt: skip
        """Compute one step's gradients and losses.

        Args:
          masters: the local shards.
          parts: the local batch [accum * micro, ...], or its micro-batches [micro, ...].
          extra: what the caller passed besides the batch, whole; None: nothing.
          rng: this step's key.
          scale: the loss scale.
          first: the index of the first micro-batch in the step.
          histories: see `kernels.fp8.delayed_scaling`; None: each array's own maximum decides its scale in fp8.
        """
        key, batch, weights = self.begin(masters, parts, extra, rng, histories)
        # The counts of all micro-batches and replicas come first: each gradient is then divided by the whole count
        # while it is computed, and the sum over devices is the gradient of the global mean, whatever each counted.
        with jax.named_scope(COUNT):
            count, mean = self.total_count(weights, batch, key, first)
        cotangent = scale / count
        # DeepSpeed's option: the sum over the replicas instead of the mean.
        if self.placed.config.gradient_allreduce_op == "sum":
            cotangent *= replicas(self.placed.mesh)
        if (devices := group_size(self.placed.mesh)) > 1:
            cotangent /= devices  # they all compute this loss, and gradients arrive as a sum over them
        cotangents = Mean(cotangent, None if mean is None else -mean * cotangent)
        summed, seen, state = self.passes.gradients(weights, batch, key, cotangents, first)
        if histories:
            summed, noted = delayed_scaling.split_gradients(summed, weights.nondiff)
        # Unscaled after the reduction, since fp16 on the wire would lose small gradients too.
        # With an infinite scale inf * (1 / inf) = NaN marks the step as overflowed; keep this form.
        unscale = 1 / scale
        with jax.named_scope(REDUCE):
            reduced = self.reduce(summed)
            merged = cast(self.passes.view.merge(reduced), jnp.float32)
        gradients = jax.tree.map(lambda g: g * unscale, merged)
        forms = (self.placed.layouts, merged), (self.passes.view.layouts, reduced)
        squares = sums_of_squares(*forms, unscale, self.placed.mesh)
        seen = self.all_reduce(seen)
        if histories:
            axes = present(self.placed.mesh, *(axis for axis in AXES if axis != PIPE))
            histories = delayed_scaling.advance(histories, self.passes.view.merge(noted), axes)
        losses = means(total(seen)), means(seen)[LOSS]
        return Result(gradients, squares, *losses, Aside(self.agree(state), histories or {}))

    def total_count(
        self, weights: DeviceWeights, batch: PyTree, key: jax.Array, first: Any
    ) -> tuple[jax.Array | float, jax.Array | None]:
        """Sum the counts of all micro-batches and replicas, before any gradient is computed.

        Returns:
          The sum; and the mean of the loss, if the count depends on the parameters, so that it has a gradient too.
        """
        accum = leading_dim(batch)
        count = counter(self.placed.model, self.weight_shapes, Inputs(_first(batch), weights.extra), key)
        if isinstance(count, float):
            return count * accum * batch_parts(self.placed.mesh), None
        if count is None:  # it depends on the parameters: one more forward pass
            loss = self.all_reduce(self.passes.losses(weights, batch, key, first)[LOSS].sum(0))
            return nonzero(loss[1]), loss[0] / nonzero(loss[1])

        def one(item: Any) -> Any:
            return count(Inputs(item[1], weights.extra), fold(key, first + item[0]))

        counts = lax.map(one, (jnp.arange(accum), batch))
        return nonzero(self.all_reduce(counts.sum())), None

    @noting_batch
    def evaluate(self, masters: PyTree, parts: Parts, extra: PyTree) -> Sums:
        """Compute the loss and metrics of the global batch without dropout (rng None)."""
        _, batch, weights = self.begin(masters, parts, extra)
        losses = self.passes.losses(weights, batch, None)
        return means(self.all_reduce(total(losses)))

    @noting_batch
    def predict(self, masters: PyTree, parts: Parts, extra: PyTree, rng: Any = None, index: Any = 0) -> PyTree:
        """Run a model that returns a row of results for each row of its batch.

        Args:
          rng: the step's key, for the dropout of its micro-batch `index` (and those after it); None: no dropout.
        """
        key, batch, weights = self.begin(masters, parts, extra, rng)
        results = self.passes.losses(weights, batch, key, index)
        for name, x in named(results).items():
            if x.shape[1:2] != (self.micro,):
                raise ConfigError(
                    f"predictions: {name or 'the result'} has shape {x.shape[1:]} for {self.micro} rows; the leading "
                    "dimension must be the rows"
                )
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    @noting_batch
    def micro_loss(
        self, masters: PyTree, parts: Parts, extra: PyTree, rng: jax.Array, index: jax.Array,
        histories: delayed_scaling.Histories | None = None,
    ) -> jax.Array:  # fmt: skip
        """Compute the loss that `gradients` would report for this micro-batch."""
        key, batch, weights = self.begin(masters, parts, extra, rng, histories)
        losses = self.passes.losses(weights, batch, key, index)
        return means(self.all_reduce(total(losses)))[LOSS]

    def begin(
        self, masters: PyTree, parts: Parts, extra: PyTree, rng: Any = None,
        histories: delayed_scaling.Histories | None = None,
    ) -> tuple[Any, PyTree, DeviceWeights]:  # fmt: skip
        """Return this replica's key, its micro-batches, and the weights in the form of the passes."""
        key = None if rng is None else self.replica_key(rng)
        batch = self.split(parts, extra, key)
        return key, batch, self.prepare(masters, extra, batch, key, histories)

    def prepare(
        self, masters: PyTree, extra: PyTree, batch: PyTree = None, key: jax.Array | None = None,
        histories: delayed_scaling.Histories | None = None,
    ) -> DeviceWeights:  # fmt: skip
        """Convert local masters to the form that the passes use; see `storage.store_weight`.

        Args:
          batch, key: split into micro-batches, whose products show which weights are cast to fp8; None: none is.
          histories: see `gradients`.
        """
        placed, view = self.placed, self.passes.view
        section, precision = placed.config.fp8, placed.precision
        in_fp8: frozenset[str] = frozenset()
        if section.enabled and batch is not None:
            in_fp8 = self.fp8.choose(placed.model, self.weight_shapes, Inputs(_first(batch), extra), key, section)

        def prepare(layout: ParamLayout, master: jax.Array, former: jax.Array | None) -> tuple[Any, Any]:
            fp8 = GRADIENTS[section.format] if layout.name in in_fp8 else None
            return storage.store_weight(layout, master, precision, fp8, former if fp8 else None)

        former = jax.tree.map(lambda layout: (histories or {}).get(layout.name), placed.layouts)
        # Layer by layer from here on, since the passes fetch, and the reductions run, layer by layer.
        if any(layout.on_host.master for layout in jax.tree.leaves(placed.layouts)):
            masters = jax.tree.map(partial(offload.copy_to_device, dtype=precision.compute), placed.layouts, masters)
        parts = view.split(masters), view.split(former)
        of_layers = view.per_layer(prepare)
        pairs = jax.tree.map(delayed_scaling.in_turn(of_layers) if histories else of_layers, view.layouts, *parts)
        diff = jax.tree.map(lambda _, pair: pair[0], view.layouts, pairs)
        nondiff = jax.tree.map(lambda _, pair: pair[1], view.layouts, pairs)
        state, nondiff = partition(nondiff, is_state(view.layouts))
        return DeviceWeights(diff, nondiff, state, extra)

    def reduce(self, gradients: PyTree) -> PyTree:
        """Reduce summed gradients to those of the local masters, in the form of the passes; see `zero`."""
        view, of = self.passes.view, self.placed
        reduce = view.per_layer(partial(storage.reduce_gradient, mesh=of.mesh, precision=of.precision))
        return map_present(reduce, view.layouts, gradients)

    def agree(self, state: PyTree) -> PyTree:
        """Average the model's new state over the replicas, and return it in the form of the masters."""
        view = self.passes.view
        agree = view.per_layer(partial(storage.agree_on_state, mesh=self.placed.mesh))
        return view.merge(map_present(agree, view.layouts, state))

    def split(self, parts: Parts, extra: PyTree, key: jax.Array | None) -> PyTree:
        """Form micro-batches [accum, micro, ...], and cast the arrays that `auto_cast` decides on."""
        batch = split_micro_batches(parts, self.micro)
        model, auto_cast, dtype = self.placed.model, self.placed.precision.auto_cast, self.placed.precision.compute
        if not auto_cast:
            return batch
        if auto_cast == "auto":
            first = Inputs(_first(batch), extra)
            return cast_arrays(batch, inputs_of_products(model, self.weight_shapes, first, key, dtype), dtype)
        return cast_arrays(batch, wide_arrays(batch, dtype), dtype)

    def replica_key(self, rng: jax.Array) -> jax.Array:
        """Derive a key for every replica, so that their dropout masks differ."""
        return jax.random.fold_in(rng, lax.axis_index(self.axes)) if self.axes else rng

    def all_reduce(self, x: Any) -> Any:
        return lax.psum(x, self.axes) if self.axes else x


def _first(batch: PyTree) -> PyTree:
    """Return the first of the micro-batches."""
    return jax.tree.map(lambda x: x[0], batch)


def split_micro_batches(parts: Sequence[PyTree], micro: int) -> PyTree:
    """Form micro-batches [accum, micro, ...] of a local batch [accum * micro, ...], or of several [micro, ...]."""
    # The rows of a global batch are those of all devices, in order, so the local part of each is already whole
    # micro-batches. (Reshaping the global array to [accum, ...] would add an all-to-all.)
    if len(parts) > 1:
        return jax.tree.map(lambda *xs: jnp.stack(xs), *parts)
    return jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), parts[0])


def sums_of_squares(
    stored: tuple[PyTree, PyTree], in_use: tuple[PyTree, PyTree], factor: jax.Array, mesh: Mesh
) -> jax.Array:
    """Sum the squares of factor * gradient over all devices, float32 [trained parameters], in the order of the layouts.

    Args:
      stored, in_use: layouts, and gradients of the local masters with None in the place of everything else; as between
        steps, and in the form that the passes use, with several arrays of one name.
    """
    sums: dict[str, jax.Array] = {}

    def add(layout: ParamLayout, g: Any) -> None:
        own = jnp.sum(jnp.square(g.astype(jnp.float32) * factor))
        sums[layout.name] = sums[layout.name] + own if layout.name in sums else own

    # Layer by layer, before the gradients are stacked: XLA then adds up each layer where it is reduced. Over the
    # stacked arrays the same sums took 6.5 ms instead of 1.8 (7.2B parameters on two H200s).
    map_present(lambda layout, g: add(layout, g) if g.size > SMALL else None, in_use[0], in_use[1])
    map_present(lambda layout, g: None if layout.name in sums else add(layout, g), *stored)
    trained = [layout for layout in jax.tree.leaves(stored[0]) if layout.trainable]
    over = {x.name: present(mesh, *(a for a in AXES if a in x.axes)) for x in trained}
    # One all-reduce for all parameters that the same axes divide: each alone would cost its latency.
    for group in dict.fromkeys(filter(None, over.values())):  # in one order, the same in every process
        names = [name for name in over if over[name] == group]
        sums |= zip(names, lax.psum(jnp.stack([sums[name] for name in names]), group), strict=True)
    return jnp.stack([sums[name] for name in over])
