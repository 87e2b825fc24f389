"""Loss and gradients of one global batch, as one device computes them: the manual region of the train step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jzero import micro_batches, zero
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.mesh import BATCH_AXES, present, replicas
from jzero.model import ENDS, STACK, Model, StackModel, fold
from jzero.precision import Precision, cast
from jzero.remat import Remat, checkpointed
from jzero.sharding import stack_length
from jzero.stack import StackView, fetch, run_stack, scanned, unrolled, unrolls
from jzero.tree import PyTree


class Result(NamedTuple):
    """Float32 `gradients` of the local masters times `unit`; the mean `loss` []; every micro-batch's loss [accum]."""

    gradients: PyTree
    unit: jax.Array
    loss: jax.Array
    micro_losses: jax.Array


@dataclass(frozen=True)
class Facts:
    """How the passes run, for the run report and the planner.

    Attributes:
      layers: of the layer stack; 0: the model has none.
      unrolled: whether they are unrolled.
      by_layer: whether ZeRO-3 gathers one layer at a time.
      always_sums: whether even a single micro-batch's gradient goes into a sum.
      layers_per_checkpoint: layers in one activation checkpoint.
      pipeline: the pipeline's line of the report.
      fallback: what the pipeline costs more than it should, and why.
    """

    remat: Remat
    layers: int = 0
    unrolled: bool = False
    by_layer: bool = False
    always_sums: bool = False
    layers_per_checkpoint: int = 1
    pipeline: str = ""
    fallback: str = ""


class Passes(NamedTuple):
    """The forward and backward passes over a device's micro-batches: in sequence here, interleaved in a pipeline.

    Attributes:
      gradients: (diff, nondiff, batch [accum, micro, ...], key, scale) -> (gradients of diff, summed over the
        micro-batches; what `scaled` returns of each micro-batch [accum, 3]).
      losses: (diff, nondiff, batch, key or None, index of the first) -> [accum, 2], each loss as (sum, count).
    """

    view: StackView
    facts: Facts
    gradients: Callable
    losses: Callable


def sequential(model: Model, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision) -> Passes:
    """Make the passes that run one micro-batch after the other, every device with all layers."""
    stack = isinstance(model, StackModel)
    layers = stack_length(layouts) if stack else 0
    view = unrolled(layouts) if stack and unrolls(config, layers) else scanned(layouts)
    regather = any(layout.rule.gather == "layer" for layout in jax.tree.leaves(layouts))
    remat = Remat.resolve(config, model, regather)
    make_loss: Callable = _stack_loss if stack else _whole_loss
    loss = make_loss(model, layouts, view, remat, precision)

    def gradients(diff: PyTree, nondiff: PyTree, batch: PyTree, key: jax.Array, scale: jax.Array) -> Any:
        accum = jax.tree.leaves(batch)[0].shape[0]

        def micro(i: Any, part: PyTree) -> tuple[PyTree, jax.Array]:
            def scaled_loss(diff: PyTree) -> tuple[jax.Array, jax.Array]:
                return scaled(loss(diff, nondiff, part, fold(key, i)), part, scale / accum, replicas(mesh))

            return jax.grad(scaled_loss, has_aux=True)(diff)

        return micro_batches.accumulate(micro, batch, diff, precision.accum)

    def losses(diff: PyTree, nondiff: PyTree, batch: PyTree, key: jax.Array | None, first: Any = 0) -> jax.Array:
        def one(item: Any) -> jax.Array:
            i, part = item
            return jnp.stack(sum_and_count(loss(diff, nondiff, part, fold(key, first + i))))

        return lax.map(one, (jnp.arange(len(jax.tree.leaves(batch)[0])), batch))

    facts = Facts(remat, layers, unrolled=stack and not view.layer_axis, by_layer=stack)
    return Passes(view, facts, gradients, losses)


def _whole_loss(model: Model, layouts: PyTree, view: StackView, remat: Remat, precision: Precision) -> Callable:
    """Make `loss(diff, nondiff, batch, key)` of a model without a stack: all weights are fetched at once."""
    run = checkpointed(lambda pair: fetch(layouts, pair, precision), model.loss, remat, unrolled=True)
    return lambda diff, nondiff, batch, key: run((diff, nondiff), batch, key)


def _stack_loss(model: StackModel, layouts: PyTree, view: StackView, remat: Remat, precision: Precision) -> Callable:
    """Make `loss(diff, nondiff, batch, key)` of prefix, stack and suffix: every layer fetches its own weights."""
    listed = not view.layer_axis
    layer = checkpointed(lambda pair: fetch(layouts[STACK], pair, precision), model.block, remat, unrolled=listed)

    def loss(diff: PyTree, nondiff: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        layers: Any = (diff[STACK], nondiff[STACK])
        if listed:
            layers = list(zip(*layers, strict=True))
        # Once, also where prefix and suffix are tied.
        ends = fetch(layouts[ENDS], (diff[ENDS], nondiff[ENDS]), precision)
        x = model.prefix(ends, batch, fold(key, 0))
        x = run_stack(layer, layers, x, key)
        return model.suffix(ends, x, batch, fold(key, stack_length(layouts) + 1))

    return loss


@dataclass(frozen=True)
class ManualRegion:
    """The functions that `jax.shard_map` maps over the mesh: local masters and local batch in, local gradients out."""

    passes: Passes
    config: Config
    mesh: Mesh
    precision: Precision
    micro: int

    @property
    def axes(self) -> tuple[str, ...]:
        return present(self.mesh, *BATCH_AXES)

    def gradients(self, masters: PyTree, batch: PyTree, rng: jax.Array, scale: jax.Array) -> Result:
        """Compute one step's gradients and losses.

        Args:
          masters: the local shards.
          batch: the local batch, leading dimension accum * micro.
          rng: this step's key.
          scale: the loss scale.
        """
        diff, nondiff = self.prepare(masters)
        gradients, seen = self.passes.gradients(diff, nondiff, self.split(batch), self.replica_key(rng), scale)
        sums, counts = self.all_reduce(seen[:, :2]).T
        total = nonzero(counts.sum())
        unit = scale * total / (len(seen) * seen[0, 2])
        if self.config.gradient_allreduce_op == "sum":
            unit /= replicas(self.mesh)
        return Result(self.reduce(gradients), unit, sums.sum() / total, sums / nonzero(counts))

    def evaluate(self, masters: PyTree, batch: PyTree) -> jax.Array:
        """Compute the loss of the global batch without dropout (rng None)."""
        total, count = self.all_reduce(self.passes.losses(*self.prepare(masters), self.split(batch), None).sum(0))
        return total / nonzero(count)

    def micro_loss(self, masters: PyTree, batch: PyTree, rng: jax.Array, index: jax.Array) -> jax.Array:
        """Compute the loss that `gradients` would report for this micro-batch."""
        diff, nondiff = self.prepare(masters)
        losses = self.passes.losses(diff, nondiff, self.split(batch), self.replica_key(rng), index)
        total, count = self.all_reduce(losses[0])
        return total / nonzero(count)

    def prepare(self, masters: PyTree) -> tuple[PyTree, PyTree]:
        """Turn local masters into (diff, nondiff), in the form that the passes use; see `zero.prepare`."""
        view = self.passes.view
        prepare = view.per_layer(partial(zero.prepare, precision=self.precision))
        pairs = jax.tree.map(prepare, view.layouts, view.split(masters))
        return tuple(jax.tree.map(lambda _, p, k=k: p[k], view.layouts, pairs) for k in (0, 1))  # type: ignore[misc, return-value]

    def reduce(self, gradients: PyTree) -> PyTree:
        """Turn summed gradients into float32 gradients of the local masters; see `zero.reduce_gradient`."""
        view = self.passes.view
        reduce = view.per_layer(partial(zero.reduce_gradient, mesh=self.mesh, precision=self.precision))
        reduced = jax.tree.map(lambda layout, g: None if g is None else reduce(layout, g), view.layouts, gradients)
        return cast(view.merge(reduced), jnp.float32)

    def split(self, batch: PyTree) -> PyTree:
        """Cut the batch into micro-batches; its floats are cast under `fp16.auto_cast`."""
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            batch = cast(batch, self.precision.compute)
        return micro_batches.split(batch, self.micro)

    def replica_key(self, rng: jax.Array) -> jax.Array:
        """Derive a key for every replica, so that their dropout masks differ."""
        return jax.random.fold_in(rng, lax.axis_index(self.axes)) if self.axes else rng

    def all_reduce(self, x: Any) -> Any:
        return lax.psum(x, self.axes) if self.axes else x


def scaled(loss: Any, part: Any, scale: jax.Array, n_replicas: int) -> tuple[jax.Array, jax.Array]:
    """A micro-batch's loss as what to differentiate, scale * sum / expected count, and [sum, count, expected]."""
    total, count = sum_and_count(loss)
    expected = n_replicas * _expected_count(loss, part)
    return total * (scale / expected), jnp.stack([total, count, jnp.float32(expected)])


def nonzero(count: jax.Array) -> jax.Array:
    """The count to divide by: 1 where nothing counted, since the sum is zero too."""
    return jnp.where(count == 0, 1, count)


def _expected_count(loss: Any, batch: Any) -> float:
    if not isinstance(loss, tuple):
        return 1.0
    leaves = jax.tree.leaves(batch)
    sizes = [x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.integer)] or [len(leaves[0])]
    return 2.0 ** round(math.log2(max(sizes)))


def sum_and_count(loss: Any) -> tuple[jax.Array, jax.Array]:
    """Read a model's loss as float32 (sum, count); a mean has count 1.

    Raises:
      ConfigError: a loss that is neither a scalar nor a pair of scalars.
    """
    parts = loss if isinstance(loss, tuple) else (loss, 1.0)
    for part in parts if len(parts) == 2 else [loss]:
        if not isinstance(part, jax.Array | np.ndarray | np.generic | float | int) or jnp.shape(part):
            found = f"of shape {jnp.shape(part)}" if hasattr(part, "shape") else f"{type(part).__name__}"
            raise ConfigError(
                f"the model's loss is or holds a value {found}: it must be a scalar, or (sum, count) of two scalars; "
                "there is no place for other outputs (write loss.mean())"
            )
    total, count = parts
    return jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32)
