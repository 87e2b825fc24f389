"""Programs that repeat one micro-batch of a step and look at it, under the layout of the run.

Each is compiled when it is first called. Their results are replicated, so that every process draws the same conclusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jzero import micro_batches, optimizers
from jzero.diagnosis.probe import Probed, Tapped, finite, largest_loss
from jzero.fp8.history import Histories
from jzero.gradients import ManualRegion
from jzero.mesh import batch_parts, batch_spec
from jzero.model import StackModel
from jzero.programs import Fed
from jzero.setup import Setup, make_passes
from jzero.sharding import specs, trainable
from jzero.state import TrainState
from jzero.tree import PyTree, leading_dim, named, partition
from jzero.zero import ParamLayout

REPLICATED: Any = PartitionSpec()


class Repeat:
    """Repeats the micro-batches of one step.

    Attributes:
      layers: in the layer stack; 0: the model has none, or one that the pipeline's stages do not divide.
      accum, micro, replicas: micro-batches in the step, rows of one on a replica, replicas.
    """

    def __init__(self, setup: Setup, state: TrainState, fed: Fed, key: jax.Array | None = None):
        """Take a step's setup, the state before it, what it ran on, and its key if `state` does not tell it."""
        self._setup, self._state, self._fed = setup, state, fed
        divided = isinstance(setup.model, StackModel) and not setup.passes.facts.fallback
        self.layers = setup.passes.facts.layers if divided else 0
        self.micro, self.replicas = setup.rows, batch_parts(setup.mesh)
        self.accum = leading_dim(fed.batch) // (self.micro * self.replicas)
        self._key = jax.random.fold_in(state.rng, state.step) if key is None else key
        self._rows = NamedSharding(setup.mesh, batch_spec(setup.mesh))
        self._replicated = NamedSharding(setup.mesh, REPLICATED)
        self._own = setup.averaging.spec if setup.averaging else REPLICATED
        self._steps = optimizers.own_steps(state.opt_state)
        self._histories = state.fp8

    @property
    def places(self) -> list[str]:
        """The places where the forward pass is looked at, in its order."""
        layers = [f"layer {i} of {self.layers}" for i in range(self.layers)]
        return ["the prefix (what is before the layers)", *layers, "the loss"] if layers else ["the loss"]

    def micro_batch(self, index: int) -> PyTree:
        """Take a micro-batch of all replicas out of the global batch; no row moves to another device."""
        return self._take(self._fed.batch, np.int32(index))

    def rows(self, part: PyTree, chosen: Sequence[int]) -> PyTree:
        """Make a micro-batch of the chosen rows, which are repeated to fill it."""
        return self._pick(part, np.resize(np.asarray(chosen, np.int32), leading_dim(part)))

    def forward(self, part: PyTree, index: int) -> np.ndarray:
        """Return the largest absolute value at each of `places` on each replica, [replicas, places]."""
        args = (self._state.params, part, self._fed.extra, self._key, np.int32(index), self._steps, self._histories)
        return np.asarray(self._forward(*args))

    def backward(self, part: PyTree, index: int, only_suffix: bool = False) -> dict[str, np.ndarray]:
        """Return whether each gradient is finite, by name: [L] of a stacked one, [] of others."""
        run = self._suffix_gradients if only_suffix else self._gradients
        scale = self._state.loss_scale.scale / self.accum  # as the step divides it
        args = (self._fed.extra, self._key, scale, self._steps, np.int32(index), self._histories)
        found = run(self._state.params, part, *args)
        return jax.tree.map(np.asarray, named(found))

    def not_finite(self, part: PyTree) -> list[str]:
        """List the leaves of a micro-batch that are not finite."""
        return [name or "batch" for name, ok in named(self._finite(part)).items() if not np.asarray(ok)]

    def numbers(self, index: int) -> list[int]:
        """Number the rows of a micro-batch, which are in the order of the devices, as rows of the global batch."""
        size = self.micro * self.replicas
        if self._fed.in_parts:
            return list(range(index * size, (index + 1) * size))
        starts = (replica * self.accum * self.micro + index * self.micro for replica in range(self.replicas))
        return [row for start in starts for row in range(start, start + self.micro)]

    # ------------------------------------------------------------------ the programs

    @cached_property
    def _take(self) -> Any:
        rows = batch_spec(self._setup.mesh)

        def take(batch: PyTree, index: jax.Array) -> PyTree:
            parts = micro_batches.split(batch, self.micro)
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), parts)

        specs: Any = (rows, REPLICATED)
        return jax.jit(jax.shard_map(take, mesh=self._setup.mesh, in_specs=specs, out_specs=rows, check_vma=False))

    @cached_property
    def _pick(self) -> Any:
        return jax.jit(lambda part, chosen: jax.tree.map(lambda x: x[chosen], part), out_shardings=self._rows)

    @cached_property
    def _finite(self) -> Any:
        return jax.jit(lambda part: jax.tree.map(finite, part), out_shardings=self._replicated)

    @cached_property
    def _forward(self) -> Any:
        setup = self._setup
        model, read = setup.model, partial(_one, setup.model)
        if self.layers:
            model, read = Probed(setup.model, self.layers), lambda seen: seen  # type: ignore[arg-type,assignment]
        passes = make_passes(model, setup.config, setup.mesh, setup.layouts, setup.precision, read=read)
        region = setup.region(passes=passes)  # the run's own model decides on auto_cast

        def run(
            masters: PyTree, part: PyTree, extra: PyTree, rng: Any, index: Any, steps: PyTree, histories: Histories
        ) -> jax.Array:
            key = region.replica_key(rng)
            batch = region.split(part, extra, key)
            weights = region.prepare(region.moved(masters, steps), extra, batch, key, histories)
            return passes.losses(weights, batch, key, index)

        out: Any = batch_spec(setup.mesh)
        rest = (REPLICATED, REPLICATED, REPLICATED, self._own, setup.histories)
        return setup.jit(setup.manual(run, *rest, out_specs=out), out_shardings=self._replicated)

    @cached_property
    def _gradients(self) -> Any:
        return self._make_gradients(only_suffix=False)

    @cached_property
    def _suffix_gradients(self) -> Any:
        return self._make_gradients(only_suffix=True)

    def _make_gradients(self, only_suffix: bool) -> Any:
        setup, averaging = self._setup, self._setup.averaging
        region = _tapped(setup, only_suffix) if self.layers else setup.region()
        layouts, _ = partition(setup.layouts, trainable(setup.layouts))
        local: Any = averaging.rows(specs(layouts)) if averaging else specs(layouts)
        rest = (REPLICATED, REPLICATED, REPLICATED, self._own, REPLICATED, setup.histories)
        manual = setup.manual(lambda *args: region.gradients(*args).gradients, *rest, out_specs=local)

        def run(*args: Any) -> PyTree:
            found = manual(*args)
            whole = averaging.total(found) if averaging else found
            return jax.tree.map(lambda layout, g: by_layer(layout, g, finite), layouts, whole)

        return setup.jit(run, out_shardings=self._replicated)


def by_layer(layout: ParamLayout, x: jax.Array, f: Any) -> jax.Array:
    """Apply f to an array, or to every layer's slice of a stacked one."""
    return jax.vmap(f)(x) if layout.stacked else f(x)


def _one(model: Any, value: Any) -> jax.Array:
    return largest_loss(model, value)[None]


def _tapped(setup: Setup, only_suffix: bool) -> ManualRegion:
    """Make the region of the run, with a tapped model in its passes."""
    config, model = setup.config, Tapped(setup.model, only_suffix)  # type: ignore[arg-type]
    if config.pipeline.schedule == "zero_bubble":  # which takes the backward pass apart; a tap is in one piece
        pipeline = config.pipeline.model_copy(update={"schedule": "interleaved"})
        config = config.model_copy(update={"pipeline": pipeline})
    return setup.region(passes=make_passes(model, config, setup.mesh, setup.layouts, setup.precision))
