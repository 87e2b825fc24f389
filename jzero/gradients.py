"""Loss and gradients of one global batch, as seen by one device: the manual region of the train step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jzero import sharding, zero
from jzero.config import ActivationCheckpointing, Config
from jzero.errors import ConfigError
from jzero.mesh import BATCH_AXES, present, replicas
from jzero.model import ENDS, STACK, Model, StackModel, fold
from jzero.precision import Precision, cast
from jzero.remat import checkpointed
from jzero.stack import run_stack, unrolls


class Result(NamedTuple):
    """Float32 `gradients` of the local masters times `unit`; the mean `loss` []; every micro-batch's loss [accum]."""

    gradients: Any
    unit: jax.Array
    loss: jax.Array
    micro_losses: jax.Array


class Gradients:
    """What `jax.shard_map` maps over the mesh: local masters and local batch in, loss and local gradients out.

    A parameter in use is a pair (active, passive), see `jzero.zero`; here they are two trees. An unrolled stack is a
    list of layers in both, so that its gradients come out layer by layer.
    """

    def __init__(self, model: Model, config: Config, mesh: Mesh, leaves: Any, precision: Precision, micro: int):
        self.model, self.config, self.mesh, self.precision, self.micro = model, config, mesh, precision, micro
        self.axes, self.replicas = present(mesh, *BATCH_AXES), replicas(mesh)
        self.row = zero.stage_row(config.zero_optimization.stage, config.pipeline.gather == "step")
        self.stacked = isinstance(model, StackModel)
        self.interval = config.pipeline.activation_checkpoint_interval
        self.interval = self.interval or getattr(model, "activation_checkpoint_interval", 0)
        self.checkpointing = config.activation_checkpointing
        if self.interval and self.checkpointing and self.checkpointing.policy == "none":
            raise ConfigError(
                f"activation_checkpoint_interval = {self.interval} of {model!r}: does nothing with "
                'activation_checkpointing.policy "none"; use policy "full" or "matmuls", or remove one'
            )
        if self.interval and (self.checkpointing is None or self.checkpointing.kind == "none"):
            self.checkpointing = ActivationCheckpointing(policy="full")
        self.leaves = self.used = leaves  # `used`: the leaves as the (active, passive) trees have them
        self.unrolled = False
        if self.stacked:
            self.length = sharding.stack_length(leaves)
            self.unrolled = unrolls(config, self.length)
            if self.unrolled:
                self.used = {ENDS: leaves[ENDS], STACK: [leaves[STACK]] * self.length}
        self.layer_axis = not self.unrolled  # whether a stacked leaf in use still has a leading axis

    def __call__(self, masters: Any, batch: Any, rng: jax.Array, scale: jax.Array) -> Result:
        """One step's gradients and losses.

        The gradient of the mean is that of the sum of sums, divided by the sum of counts, which is known only after the
        last forward pass. So every micro-batch's gradient is born divided by the count that is expected (exactly 1 for
        a mean loss), and `unit` holds what that is off by, and the loss scale.

        Args:
          masters: the local shards.
          batch: the local batch, leading dimension accum * micro.
          rng: this step's key.
          scale: the loss scale.
        """
        active, passive = self.prepare(masters)
        gradients, seen = self.accumulate(active, passive, self.micro_batches(batch), self.replica_key(rng), scale)
        sums, counts = self.all_reduce(seen[:, :2]).T
        total = _nonzero(counts.sum())
        unit = scale * total / (len(seen) * seen[0, 2])
        if self.config.gradient_allreduce_op == "sum":
            unit /= self.replicas
        return Result(self.reduce(gradients), unit, sums.sum() / total, sums / _nonzero(counts))

    def accumulate(self, active: Any, passive: Any, batch: Any, rng: jax.Array, scale: jax.Array) -> tuple[Any, Any]:
        """The micro-batches' gradients, summed, and what `scaled` says of each [accum, 3]."""
        accum = jax.tree.leaves(batch)[0].shape[0]

        def micro(i: Any, part: Any) -> tuple[Any, jax.Array]:
            def loss(active: Any) -> tuple[jax.Array, jax.Array]:
                return self.scaled(self.loss(active, passive, part, fold(rng, i)), part, scale / accum)

            return jax.grad(loss, has_aux=True)(active)

        if accum == 1:
            gradients, seen = micro(0, jax.tree.map(lambda x: x[0], batch))
            return gradients, seen[None]
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, self.precision.accum), active)

        def body(summed: Any, item: Any) -> tuple[Any, jax.Array]:
            gradients, seen = micro(*item)
            return jax.tree.map(lambda s, g: s + g.astype(s.dtype), summed, gradients), seen

        return lax.scan(body, empty, (jnp.arange(accum), batch))

    def scaled(self, loss: Any, part: Any, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A micro-batch's loss as what to differentiate, scale * sum / expected count, and [sum, count, expected]."""
        total, count = sum_and_count(loss)
        expected = self.replicas * _expected_count(loss, part)
        return total * (scale / expected), jnp.stack([total, count, jnp.float32(expected)])

    def losses(self, active: Any, passive: Any, batch: Any, rng: jax.Array | None, first: Any = 0) -> jax.Array:
        """(sum, count) of each micro-batch [n, 2], the first of them being number `first` of the step."""

        def loss(item: Any) -> jax.Array:
            i, part = item
            return jnp.stack(sum_and_count(self.loss(active, passive, part, fold(rng, first + i))))

        return lax.map(loss, (jnp.arange(len(jax.tree.leaves(batch)[0])), batch))

    def evaluate(self, masters: Any, batch: Any) -> jax.Array:
        """The loss of the global batch without dropout (rng None)."""
        total, count = self.all_reduce(self.losses(*self.prepare(masters), self.micro_batches(batch), None).sum(0))
        return total / _nonzero(count)

    def micro_loss(self, masters: Any, batch: Any, rng: jax.Array, index: jax.Array) -> jax.Array:
        """The loss that `__call__` would report for this micro-batch."""
        pairs, parts = self.prepare(masters), self.micro_batches(batch)
        total, count = self.all_reduce(self.losses(*pairs, parts, self.replica_key(rng), index)[0])
        return total / _nonzero(count)

    @property
    def layer_by_layer(self) -> bool:
        """Whether stage 3 gathers that much at a time."""
        return self.stacked

    @property
    def interval_in_use(self) -> int:
        """Layers in one activation checkpoint."""
        return 1

    def sums(self, micro_batches: int) -> bool:
        """Whether the gradients of so many micro-batches are summed in `precision.accum`."""
        return micro_batches > 1

    def replica_key(self, rng: jax.Array) -> jax.Array:
        """A key of its own for every replica, so that their dropout masks differ."""
        return jax.random.fold_in(rng, lax.axis_index(self.axes)) if self.axes else rng

    def micro_batches(self, batch: Any) -> Any:
        """Local batch [accum * micro, ...] -> [accum, micro, ...]; floats in half precision under `fp16.auto_cast`."""
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            batch = cast(batch, self.precision.compute)
        return jax.tree.map(lambda x: x.reshape(-1, self.micro, *x.shape[1:]), batch)

    def all_reduce(self, x: Any) -> Any:
        return lax.psum(x, self.axes) if self.axes else x

    def prepare(self, masters: Any) -> tuple[Any, Any]:
        """Local masters -> (active, passive); gathers what is gathered once a step."""
        prepare = self.per_layer(partial(zero.prepare, precision=self.precision))
        pairs = jax.tree.map(prepare, self.used, self.spread(masters))
        return tuple(jax.tree.map(lambda _, p, k=k: p[k], self.used, pairs) for k in (0, 1))  # type: ignore[misc, return-value]

    def reduce(self, gradients: Any) -> Any:
        """Accumulated gradients -> float32 gradients of the local masters; reduces what is reduced once a step."""
        reduce = self.per_layer(partial(zero.reduce_gradient, mesh=self.mesh, precision=self.precision))
        reduced = jax.tree.map(lambda leaf, g: None if g is None else reduce(leaf, g), self.used, gradients)
        return cast(self.collect(reduced), jnp.float32)

    def spread(self, masters: Any) -> Any:
        """The masters as they are used: of an unrolled stack a list of layers."""
        if not self.unrolled:
            return masters
        layers = [jax.tree.map(lambda m, i=i: m[i], masters[STACK]) for i in range(self.length)]  # type: ignore[misc]
        return {ENDS: masters[ENDS], STACK: layers}

    def collect(self, used: Any) -> Any:
        """The inverse of `spread`."""
        if not self.unrolled:
            return used
        return {ENDS: used[ENDS], STACK: jax.tree.map(lambda *layers: jnp.stack(layers), *used[STACK])}

    def per_layer(self, f: Callable) -> Callable:
        """`f(leaf, x)`, mapped over the layer axis where a stack in use has one."""

        def each(leaf: zero.Leaf, x: Any) -> Any:
            one = partial(f, leaf)
            return jax.vmap(one)(x) if leaf.stacked and self.layer_axis else one(x)

        return each

    def fetch(self, leaves: Any, pair: Any) -> Any:
        """(active, passive) -> the whole weights, where they are used."""
        return jax.tree.map(partial(zero.fetch, precision=self.precision), leaves, *pair)

    def loss(self, active: Any, passive: Any, batch: Any, rng: jax.Array | None) -> Any:
        """The model's loss of one micro-batch, every weight fetched where it is used."""
        regather = any(leaf.row.gather == "layer" for leaf in jax.tree.leaves(self.leaves))
        saving = partial(checkpointed, checkpointing=self.checkpointing, regather=regather)

        if not self.stacked:
            whole = saving(partial(self.fetch, self.leaves), self.model.loss, unrolled=True)
            return whole((active, passive), batch, rng)

        model: StackModel = self.model  # type: ignore[assignment]
        layer = saving(partial(self.fetch, self.leaves[STACK]), model.block, unrolled=self.unrolled)
        layers: Any = (active[STACK], passive[STACK])
        if self.unrolled:
            layers = list(zip(*layers, strict=True))
        # Once, also where prefix and suffix are tied.
        ends = self.fetch(self.leaves[ENDS], (active[ENDS], passive[ENDS]))
        x = model.prefix(ends, batch, fold(rng, 0))
        x = run_stack(layer, layers, x, rng)
        return model.suffix(ends, x, batch, fold(rng, self.length + 1))


def _nonzero(count: jax.Array) -> jax.Array:
    """The count to divide by; where nothing counted the sum is zero too."""
    return jnp.where(count == 0, 1, count)


def _expected_count(loss: Any, batch: Any) -> float:
    """About how much one micro-batch counts, known before it has been counted; for a mean loss exactly 1.

    Gradients are born divided by it, which keeps them in fp16's range; what it is off by is made good once the count
    is known. A power of two, so that nothing is rounded: the elements of the largest integer leaf (tokens, labels).
    """
    if not isinstance(loss, tuple):
        return 1.0
    leaves = jax.tree.leaves(batch)
    sizes = [x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.integer)] or [len(leaves[0])]
    return 2.0 ** round(math.log2(max(sizes)))


def sum_and_count(loss: Any) -> tuple[jax.Array, jax.Array]:
    """A model's loss as float32 (sum, count); a mean counts as one."""
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
