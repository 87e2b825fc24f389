"""Programs that repeat one micro-batch of a step and look at it, under the layout of the run.

Each is compiled when it is first called. Their results are replicated, so that every process draws the same conclusion.
Models around the run's model look at it from inside: at what its parts give, and at their gradients. They follow the
model's protocol, so they run like it: in every ZeRO stage, scanned or unrolled, cut into pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.distributed.host_collectives import Guard
from jzero.kernels.fp8.delayed_scaling import Histories
from jzero.layout.sharding import specs, trainable
from jzero.loss import LOSS, nonzero, read_loss
from jzero.mesh import batch_parts, batch_spec
from jzero.model import StackModel
from jzero.passes.gradients import DeviceFunctions, Parts, split_micro_batches
from jzero.step.call import Call
from jzero.step.programs import StepInput
from jzero.step.setup import Setup, make_passes
from jzero.step.state import TrainState
from jzero.tree import PyTree, leading_dim, named, partition

Program = Callable[..., Any]
Seen = jax.Array  # [L + 2]: the largest absolute value after the prefix, after each of the L layers, and of the loss


def largest(tree: PyTree) -> jax.Array:
    """Compute the largest absolute value of the floats in a tree, on one device; NaN if one is NaN.

    >>> float(largest({"x": jnp.array([-2.0, 1.0]), "mask": jnp.array([9])}))
    2.0
    """
    return jnp.stack([jnp.zeros(()), *(jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in floats(tree))]).max()


def is_finite(tree: PyTree) -> jax.Array:
    """Return whether all floats in a tree are finite, on all devices; a maximum over devices may lose a NaN.

    >>> bool(is_finite({"x": jnp.array([1.0, jnp.inf]), "ids": jnp.array([1])}))
    False
    """
    return jnp.stack([jnp.ones((), bool), *(jnp.isfinite(x).all() for x in floats(tree))]).all()


def floats(tree: PyTree) -> list[jax.Array]:
    """List the leaves that are floats."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)]


def largest_loss(model: Any, value: Any) -> jax.Array:
    """Compute the absolute value of what the model's loss returned for a micro-batch."""
    total, count = read_loss(model, value)[LOSS]
    return jnp.abs(total / nonzero(count))


class _Around:
    """A model around another one, with its parameters, its state and its random numbers."""

    def __init__(self, model: StackModel):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def init(self, rng: jax.Array) -> PyTree:
        return self._model.init(rng)

    def loss(self, params: PyTree, batch: PyTree, rng: jax.Array | None, **extra: Any) -> Any:
        return self._model.loss(params, batch, rng, **extra)  # for those who trace it

    def _split(self, result: Any) -> tuple[Any, dict[str, Any]]:
        return result if getattr(self._model, "state", ()) else (result, {})

    def _join(self, result: Any, new: dict[str, Any]) -> Any:
        return (result, new) if getattr(self._model, "state", ()) else result


class Probed(_Around):
    """Returns `Seen` in the place of the loss. It travels beside the activations, with the number of the next layer."""

    def __init__(self, model: StackModel, layers: int):
        super().__init__(model)
        self._layers = layers

    def prefix(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, **extra: Any) -> Any:
        x, new = self._split(self._model.prefix(ends, batch, rng, **extra))
        seen = jnp.zeros(self._layers + 2).at[0].set(largest(x))
        return self._join((x, seen, jnp.ones(())), new)  # a float: pipelines on CPUs sum no integers beside floats

    def block(self, layer: PyTree, carry: PyTree, rng: jax.Array | None) -> Any:
        x, seen, number = carry
        x, new = self._split(self._model.block(layer, x, rng))
        return self._join((x, seen.at[number.astype(jnp.int32)].set(largest(x)), number + 1), new)

    def suffix(self, ends: PyTree, carry: PyTree, batch: PyTree, rng: jax.Array | None, **extra: Any) -> Any:
        x, seen, _ = carry
        value, new = self._split(self._model.suffix(ends, x, batch, rng, **extra))
        return self._join(seen.at[-1].set(largest_loss(self._model, value)), new)


class Tapped(_Around):
    """Marks a layer's gradient with NaN if the gradient of the layer's input is not finite.

    So a layer whose gradient is finite has passed on finite gradients, and the last layer whose gradient is not is the
    first that failed in the backward pass. With `only_suffix` the backward pass ends before the layers.
    """

    def __init__(self, model: StackModel, only_suffix: bool):
        super().__init__(model)
        self._only_suffix = only_suffix

    def prefix(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, **extra: Any) -> Any:
        return self._model.prefix(ends, batch, rng, **extra)

    def block(self, layer: PyTree, x: PyTree, rng: jax.Array | None) -> Any:
        return self._model.block(*_tap(layer, x), rng)

    def suffix(self, ends: PyTree, x: PyTree, batch: PyTree, rng: jax.Array | None, **extra: Any) -> Any:
        if self._only_suffix:
            ends, x = _tap(ends, jax.lax.stop_gradient(x))
        return self._model.suffix(ends, x, batch, rng, **extra)


@jax.custom_vjp
def _tap(weights: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """Return both; the gradient of `weights` becomes NaN if that of x is not finite."""
    return weights, x


def _forward(weights: PyTree, x: PyTree) -> tuple[tuple[PyTree, PyTree], None]:
    return (weights, x), None


def _backward(_: None, gradients: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    of_weights, of_x = gradients
    mark = jnp.where(is_finite([g for g in jax.tree.leaves(of_x) if g.dtype != jax.dtypes.float0]), 0.0, jnp.nan)

    def add(g: jax.Array) -> jax.Array:
        return g if g.dtype == jax.dtypes.float0 else g + mark.astype(g.dtype)

    return jax.tree.map(add, of_weights), of_x


_tap.defvjp(_forward, _backward)


REPLICATED: Any = PartitionSpec()


class Repeat:
    """Repeats the micro-batches of one step.

    Attributes:
      setup, state, fed: the step's, the state before it, what it ran on.
      layers: in the layer stack; 0: the model has none, or one that the pipeline's stages do not divide.
      accum, micro, replicas: micro-batches in the step, rows of one on a replica, replicas.
    """

    def __init__(self, setup: Setup, state: TrainState, fed: StepInput, key: jax.Array | None = None):
        """Take a step's setup, the state before it, what it ran on, and its key if `state` does not tell it."""
        self.setup, self.state, self.fed = setup, state, fed
        divided = isinstance(setup.model, StackModel) and not setup.passes.facts.fallback
        self.layers = setup.passes.facts.layers if divided else 0
        self.micro, self.replicas = setup.rows, batch_parts(setup.mesh)
        self.accum = sum(map(leading_dim, fed.batch)) // (self.micro * self.replicas)
        self._key = jax.random.fold_in(state.rng, state.step) if key is None else key
        rows, whole = NamedSharding(setup.mesh, batch_spec(setup.mesh)), NamedSharding(setup.mesh, REPLICATED)
        self._take = self._take_program()
        self._pick = jax.jit(lambda part, chosen: jax.tree.map(lambda x: x[chosen], part), out_shardings=rows)
        self._finite = jax.jit(lambda part: jax.tree.map(is_finite, part), out_shardings=whole)
        guard = Guard(setup.mesh, setup.config, setup.layouts)
        self._forward = Call("the forward pass of a micro-batch", self._forward_program(), guard)
        self._gradients = Call("the gradients of a micro-batch", self._gradients_program(False), guard)
        self._suffix = Call("the suffix's gradients of a micro-batch", self._gradients_program(True), guard)

    @property
    def places(self) -> list[str]:
        """The places where the forward pass is looked at, in its order."""
        layers = [f"layer {i} of {self.layers}" for i in range(self.layers)]
        return ["the prefix (what is before the layers)", *layers, "the loss"] if layers else ["the loss"]

    def micro_batch(self, index: int) -> PyTree:
        """Take a micro-batch of all replicas out of the batch; no row moves to another device."""
        parts = self.fed.batch
        return parts[index] if len(parts) > 1 else self._take(parts, np.int32(index))

    def rows(self, part: PyTree, chosen: Sequence[int]) -> PyTree:
        """Make a micro-batch of the chosen rows, which are repeated to fill it."""
        return self._pick(part, np.resize(np.asarray(chosen, np.int32), leading_dim(part)))

    def forward(self, part: PyTree, index: int) -> np.ndarray:
        """Return the largest absolute value at each of `places` on each replica, [replicas, places]."""
        state, fed = self.state, self.fed
        return np.asarray(self._forward(state.params, [part], fed.extra, self._key, np.int32(index), state.fp8))

    def backward(self, part: PyTree, index: int, only_suffix: bool = False) -> dict[str, np.ndarray]:
        """Return whether each gradient is finite, by name: [L] of a stacked one, [] of others."""
        state, fed, run = self.state, self.fed, self._suffix if only_suffix else self._gradients
        scale = state.loss_scale.scale / self.accum  # as the step divides it
        found = run(state.params, [part], fed.extra, self._key, scale, np.int32(index), state.fp8)
        return jax.tree.map(np.asarray, named(found))

    def not_finite(self, part: PyTree) -> list[str]:
        """List the leaves of a micro-batch that are not finite."""
        return [name or "batch" for name, ok in named(self._finite(part)).items() if not np.asarray(ok)]

    def numbers(self, index: int) -> list[int]:
        """Number the rows of a micro-batch, which are in the order of the devices, as rows of the global batch."""
        size = self.micro * self.replicas
        if len(self.fed.batch) > 1:
            return list(range(index * size, (index + 1) * size))
        starts = (replica * self.accum * self.micro + index * self.micro for replica in range(self.replicas))
        return [row for start in starts for row in range(start, start + self.micro)]

    # ------------------------------------------------------------------ the programs

    def _take_program(self) -> Program:
        rows = batch_spec(self.setup.mesh)

        def take(parts: Parts, index: jax.Array) -> PyTree:
            batch = split_micro_batches(parts, self.micro)
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), batch)

        specs: Any = (rows, REPLICATED)
        return jax.jit(jax.shard_map(take, mesh=self.setup.mesh, in_specs=specs, out_specs=rows, check_vma=False))

    def _forward_program(self) -> Program:
        setup = self.setup
        if self.layers:
            probed: Any = Probed(setup.model, self.layers)  # type: ignore[arg-type]
            passes = make_passes(replace(setup, model=probed), lambda seen: seen)
        else:
            passes = make_passes(setup, lambda value: largest_loss(setup.model, value)[None])
        region = setup.region  # the run's own model decides on auto_cast

        def run(
            masters: PyTree, parts: Parts, extra: PyTree, rng: jax.Array, index: jax.Array, histories: Histories
        ) -> jax.Array:
            key = region.replica_key(rng)
            batch = region.split(parts, extra, key)
            weights = region.prepare(masters, extra, batch, key, histories)
            return passes.losses(weights, batch, key, index)

        out: Any = batch_spec(setup.mesh)
        rest = (REPLICATED, REPLICATED, REPLICATED, setup.histories)
        return setup.jit(setup.manual(run, *rest, out_specs=out), out_shardings=NamedSharding(setup.mesh, REPLICATED))

    def _gradients_program(self, only_suffix: bool) -> Program:
        setup = self.setup
        region = _tapped(setup, only_suffix) if self.layers else setup.region
        layouts, _ = partition(setup.layouts, trainable(setup.layouts))
        rest = (REPLICATED, REPLICATED, REPLICATED, REPLICATED, setup.histories)
        manual = setup.manual(lambda *args: region.gradients(*args).gradients, *rest, out_specs=specs(layouts))

        def run(*args: Any) -> PyTree:
            return jax.tree.map(
                lambda layout, g: (jax.vmap(is_finite) if layout.stacked else is_finite)(g), layouts, manual(*args)
            )

        return setup.jit(run, out_shardings=NamedSharding(setup.mesh, REPLICATED))


def _tapped(setup: Setup, only_suffix: bool) -> DeviceFunctions:
    """Make the region of the run, with a tapped model in its passes."""
    config, model = setup.config, Tapped(setup.model, only_suffix)  # type: ignore[arg-type]
    if config.pipeline.schedule == "zero_bubble":  # which takes the backward pass apart; a tap is in one piece
        pipeline = config.pipeline.model_copy(update={"schedule": "interleaved"})
        config = config.model_copy(update={"pipeline": pipeline})
    return replace(setup, passes=make_passes(replace(setup, model=model, config=config))).region
