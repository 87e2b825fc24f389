"""Loss and gradients of one global batch, as seen by one device: the manual region of the train step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero import zero
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.mesh import BATCH_AXES, present, replicas
from jzero.model import ENDS, STACK, Model, StackModel, fold
from jzero.precision import Precision, cast
from jzero.stack import checkpointed, run_stack, unrolls


class Gradients:
    """What `jax.shard_map` maps over the mesh: local masters and local batch in, loss and local gradients out.

    A parameter in use is a pair (active, passive), see `jzero.zero`; here they are two trees. An unrolled stack is a
    list of layers in both, so that its gradients come out layer by layer.
    """

    def __init__(self, model: Model, config: Config, mesh: Mesh, leaves: Any, precision: Precision):
        self.model, self.config, self.mesh, self.precision = model, config, mesh, precision
        self.axes, self.replicas = present(mesh, *BATCH_AXES), replicas(mesh)
        self.stacked = isinstance(model, StackModel)
        self.leaves = self.used = leaves  # `used`: the leaves as the (active, passive) trees have them
        self.unrolled = False
        if self.stacked:
            self.length = jax.tree.leaves(leaves[STACK])[0].shape[0]
            self.unrolled = unrolls(config, self.length)
            if self.unrolled:
                self.used = {ENDS: leaves[ENDS], STACK: [leaves[STACK]] * self.length}

    def __call__(self, masters: Any, batch: Any, rng: jax.Array, scale: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """One step's (gradients of the local masters times `scale`, loss [], loss of every micro-batch [accum]).

        Args:
          masters: the local shards.
          batch: the local batch, leading dimension accum * micro.
          rng: this step's key.
          scale: the loss scale.
        """
        active, passive = self.prepare(masters)
        batch = self.micro_batches(batch)
        weights = self.weights(batch)
        accum, total = len(weights), jnp.where(weights.sum() == 0, 1, weights.sum())
        seed = scale / total * (self.replicas if self.config.gradient_allreduce_op == "sum" else 1)
        rng = self.replica_key(rng)

        def micro(i: Any, part: Any) -> tuple[Any, jax.Array]:
            def scaled(active: Any) -> tuple[jax.Array, jax.Array]:
                loss, _ = self.loss(active, passive, part, fold(rng, i))
                return loss * seed, loss

            return jax.grad(scaled, has_aux=True)(active)

        if accum == 1:
            gradients, loss = micro(0, jax.tree.map(lambda x: x[0], batch))
            losses = loss[None]
        else:
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, self.precision.accum), active)

            def body(summed: Any, item: Any) -> tuple[Any, jax.Array]:
                gradients, loss = micro(*item)
                return jax.tree.map(lambda s, g: s + g.astype(s.dtype), summed, gradients), loss

            gradients, losses = lax.scan(body, empty, (jnp.arange(accum), batch))
        losses = self.all_reduce(losses)
        return self.reduce(gradients), losses.sum() / total, losses / weights

    def evaluate(self, masters: Any, batch: Any) -> jax.Array:
        """The loss of the global batch without dropout (rng None)."""
        active, passive = self.prepare(masters)
        batch = self.micro_batches(batch)
        sums, counts = lax.map(lambda part: self.loss(active, passive, part, None), batch)
        total, count = self.all_reduce((sums.sum(), counts.sum()))
        return total / count

    def micro_loss(self, masters: Any, batch: Any, rng: jax.Array, index: jax.Array) -> jax.Array:
        """The loss that `__call__` would report for this micro-batch."""
        active, passive = self.prepare(masters)
        part = cast(batch, self.precision.compute)
        total, count = self.all_reduce(self.loss(active, passive, part, fold(self.replica_key(rng), index)))
        return total / count

    def replica_key(self, rng: jax.Array) -> jax.Array:
        """A key of its own for every replica, so that their dropout masks differ."""
        return jax.random.fold_in(rng, lax.axis_index(self.axes)) if self.axes else rng

    def micro_batches(self, batch: Any) -> Any:
        """Local batch [accum * micro, ...] -> [accum, micro, ...], floats in the compute dtype."""
        micro = self.config.batch(self.replicas).micro
        return jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), cast(batch, self.precision.compute))

    def all_reduce(self, x: Any) -> Any:
        return lax.psum(x, self.axes) if self.axes else x

    def weights(self, batch: Any) -> jax.Array:
        """How much each micro-batch of the step weighs, over all replicas: its count, or 1 a replica. [accum] float32.

        Known before the first forward pass, so every gradient is born with its final magnitude. A count does not
        depend on the parameters: of the forward pass written here, on NaNs, the compiler keeps only the counting.
        """
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, self.precision.compute), self.leaves)

        def count(part: Any) -> jax.Array:
            return _sum_and_count(self.model.loss(params, part, None))[1]

        first = jax.tree.map(lambda x: x[0], batch)
        if isinstance(jax.eval_shape(lambda part: self.model.loss(params, part, None), first), tuple):
            return self.all_reduce(lax.map(count, batch))
        return jnp.full(len(jax.tree.leaves(batch)[0]), self.replicas, jnp.float32)

    def prepare(self, masters: Any) -> tuple[Any, Any]:
        """Local masters -> (active, passive); gathers what is gathered once a step."""

        def pair(leaf: zero.Leaf, master: jax.Array) -> tuple[Any, Any]:
            each_layer = leaf.stacked and not self.unrolled
            one = partial(zero.prepare, leaf, precision=self.precision)
            return (jax.vmap(one) if each_layer else one)(master)

        if self.unrolled:
            layers = [jax.tree.map(lambda m, i=i: m[i], masters[STACK]) for i in range(self.length)]  # type: ignore[misc]
            masters = {ENDS: masters[ENDS], STACK: layers}
        pairs = jax.tree.map(pair, self.used, masters)
        return tuple(jax.tree.map(lambda _, p, k=k: p[k], self.used, pairs) for k in (0, 1))  # type: ignore[misc, return-value]

    def reduce(self, gradients: Any) -> Any:
        """Accumulated gradients -> float32 gradients of the local masters; reduces what is reduced once a step."""

        def reduced(leaf: zero.Leaf, gradient: Any) -> Any:
            each_layer = leaf.stacked and not self.unrolled
            one = partial(zero.reduce, leaf, mesh=self.mesh, precision=self.precision)
            return None if gradient is None else (jax.vmap(one) if each_layer else one)(gradient)

        gradients = cast(jax.tree.map(reduced, self.used, gradients), jnp.float32)
        if self.unrolled:
            stack = jax.tree.map(lambda *layers: jnp.stack(layers), *gradients[STACK])
            gradients = {ENDS: gradients[ENDS], STACK: stack}
        return gradients

    def loss(self, active: Any, passive: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """(sum, count) of one micro-batch, every weight fetched where it is used."""
        regather = any(leaf.stage.gather == "layer" for leaf in jax.tree.leaves(self.leaves))
        saving = partial(checkpointed, checkpointing=self.config.activation_checkpointing, regather=regather)

        def fetch(leaves: Any, pair: Any) -> Any:
            return jax.tree.map(partial(zero.fetch, precision=self.precision), leaves, *pair)

        if not self.stacked:
            whole = saving(partial(fetch, self.leaves), self.model.loss, unrolled=True)
            return _sum_and_count(whole((active, passive), batch, rng))

        model: StackModel = self.model  # type: ignore[assignment]
        layer = saving(partial(fetch, self.leaves[STACK]), model.block, unrolled=self.unrolled)
        layers: Any = (active[STACK], passive[STACK])
        if self.unrolled:
            layers = list(zip(*layers, strict=True))
        ends = fetch(self.leaves[ENDS], (active[ENDS], passive[ENDS]))  # once, also where prefix and suffix are tied
        x = model.prefix(ends, batch, fold(rng, 0))
        x = run_stack(layer, layers, x, rng)
        return _sum_and_count(model.suffix(ends, x, batch, fold(rng, self.length + 1)))


def _sum_and_count(loss: Any) -> tuple[jax.Array, jax.Array]:
    """A model's loss as float32 (sum, count); a mean counts as one."""
    total, count = loss if isinstance(loss, tuple) else (loss, 1.0)
    if jnp.shape(total) or jnp.shape(count):
        raise ConfigError(
            f"the model's loss has the shape {jnp.shape(total)}: it must be a scalar, or (sum, count) of two scalars"
        )
    return jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32)
