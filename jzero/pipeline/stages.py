"""Loss and gradients on a mesh with `pipe` > 1: what the stages hold, and the functions that a tick calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero import zero
from jzero.config import ActivationCheckpointing
from jzero.errors import ConfigError
from jzero.gradients import Gradients
from jzero.mesh import PIPE
from jzero.model import ENDS, STACK, fold
from jzero.pipeline import vocab_parallel
from jzero.pipeline.chunk_placement import from_chunks, to_chunks
from jzero.pipeline.executor import Run
from jzero.pipeline.layer_switch import switched
from jzero.pipeline.module import PipelineModule
from jzero.pipeline.program import make_program
from jzero.pipeline.schedules import Schedule, forward_only, make_schedule
from jzero.precision import cast
from jzero.remat import checkpointed

Functions = tuple[Callable, Callable, Callable]  # prefix, chunk, suffix


def pipeline_gradients(
    model: Any, config: Any, mesh: Any, leaves: Any, precision: Any, micro: int
) -> PipelineGradients:
    """The `PipelineGradients` for a model with a layer stack, or for a `PipelineModule` without one to divide.

    Raises:
      ConfigError: a model that cannot be cut, or not into so many stages.
    """
    parts = mesh.shape[PIPE] * config.pipeline.chunks
    switches = isinstance(model, PipelineModule) and (not model.stack or len(model.stack) % parts)
    return (SwitchedGradients if switches else PipelineGradients)(model, config, mesh, leaves, precision, micro)


class PipelineGradients(Gradients):
    """`Gradients` on a mesh with `pipe` > 1: the micro-batches go through the stages as the schedule says.

    The stack in use is a list of the layers of a chunk; with several chunks a leaf has a leading axis for them.
    """

    def __init__(self, model: Any, config: Any, mesh: Any, leaves: Any, precision: Any, micro: int):
        super().__init__(model, config, mesh, leaves, precision, micro)
        self.stages, self.chunks = mesh.shape[PIPE], config.pipeline.chunks
        self.parts = self.stages * self.chunks
        self._cut()

    def _refuse(self, key: str, why: str) -> None:
        raise ConfigError(f"{key} with mesh.pipe = {self.stages}: {why}; leave it out")

    def _cut(self) -> None:
        if self.checkpointing and self.checkpointing.cpu_checkpointing:
            self._refuse(
                "activation_checkpointing.cpu_checkpointing = true", "not yet: a pipeline's stash is on the GPU"
            )
        if not self.stacked:
            raise ConfigError(
                f"mesh.pipe = {self.stages}: {self.model!r} has no layer stack to cut into stages; give it prefix, "
                "block, suffix (see jzero/model.py), or write it as a jzero.PipelineModule"
            )
        if self.length % self.parts:
            fit = [str(n) for n in range(2, self.length + 1) if self.length % (n * self.chunks) == 0]
            raise ConfigError(
                f"mesh.pipe = {self.stages} stages x pipeline.chunks = {self.chunks}: must divide the {self.length} "
                f"layers of {self.model!r}; with {self.chunks} chunks per stage what fits: "
                f"{', '.join(fit) or 'no number of stages'}"
            )
        if self.config.stack.unroll is False:
            self._refuse("stack.unroll = false", "the layers of a pipeline's chunk are always unrolled")
        self.depth, self.unrolled, self.layer_axis = self.length // self.parts, True, self.chunks > 1
        self.used = {ENDS: self.leaves[ENDS], STACK: [self.leaves[STACK]] * self.depth}
        divided = [leaf for leaf in jax.tree.leaves(self.used[ENDS]) if leaf.on_pipe]
        self.vocabulary_axis = PIPE if divided else None
        self.vocabulary_sizes = {size for leaf in divided for size in leaf.shape}

    def describe(self, micro_batches: int) -> str:
        """The line of the run report."""
        ends = "divided among the stages" if self.vocabulary_axis else "computed by all stages together"
        return f"{self._summary(micro_batches)}; {self.depth} layers a chunk, prefix and suffix {ends}"

    def _summary(self, micro_batches: int) -> str:
        schedule = self.schedule(micro_batches)
        chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"{self.stages} stages{chunks}, {schedule.name}: {schedule.ticks} ticks for {micro_batches} micro-batches, "
            f"bubble {schedule.bubble():.1%}, at most {schedule.in_flight.max()} chunks in flight"
        )

    def schedule(self, micro_batches: int) -> Schedule:
        return make_schedule(self.config.pipeline.schedule, self.stages, micro_batches, self.chunks)

    @property
    def interval_in_use(self) -> int:
        return min(self.interval or 1, self.depth)

    def sums(self, micro_batches: int) -> bool:
        return True

    def accumulate(self, active: Any, passive: Any, batch: Any, rng: jax.Array, scale: jax.Array) -> tuple[Any, Any]:
        n = len(jax.tree.leaves(batch)[0])
        program = make_program(self.schedule(n))
        gradients, seen = Run(self, program, (active, passive), batch, rng, 0, scale / n).result()

        def once(leaf: zero.Leaf, g: Any) -> Any:
            return g if g is None or leaf.on_pipe else self._first(g)

        return {**gradients, ENDS: jax.tree.map(once, self.used[ENDS], gradients[ENDS])}, self._agreed(seen)

    def _first(self, x: jax.Array) -> jax.Array:
        """x on the first stage, elsewhere zero: of what all stages computed one counts, so that they never differ."""
        return jnp.where(lax.axis_index(PIPE) == 0, x, 0)

    def _agreed(self, seen: jax.Array) -> jax.Array:
        return lax.psum(self._first(seen), PIPE)

    def losses(self, active: Any, passive: Any, batch: Any, rng: jax.Array | None, first: Any = 0) -> jax.Array:
        program = make_program(forward_only(self.stages, len(jax.tree.leaves(batch)[0]), self.chunks))
        return self._agreed(Run(self, program, (active, passive), batch, rng, first).result()[1])

    def spread(self, masters: Any) -> Any:
        stack, p = masters[STACK], self.precision
        if self.layer_axis:  # in the widest dtype that is needed inside, which is often half of the masters'
            stack = cast(stack, jnp.promote_types(p.compute, p.reduce))
            stack = jax.tree.map(lambda m: to_chunks(m, self.stages, self.chunks).swapaxes(0, 1), stack)
        layers = [jax.tree.map(lambda m, k=k: m[k], stack) for k in range(self.depth)]  # type: ignore[misc]
        return {ENDS: masters[ENDS], STACK: layers}

    def collect(self, used: Any) -> Any:
        def stack(*layers: jax.Array) -> jax.Array:
            if not self.layer_axis:
                return jnp.stack(layers)
            return from_chunks(jnp.stack(layers, axis=1).astype(self.precision.reduce), self.stages, self.chunks)

        return {ENDS: used[ENDS], STACK: jax.tree.map(stack, *used[STACK])}

    def functions(self, pairs: Any, part: Any) -> Functions:
        """What a tick calls, for parameters and micro-batches of these shapes.

        prefix(ends, batch, key) -> x; chunk(weights, x, context) -> x; suffix(ends, x, batch, key) -> loss. The weights
        are (active, passive); a context is the micro-batch's key and which chunk of the whole model it is.
        """
        return self.prefix, self.chunk, self.suffix

    def prefix(self, ends: Any, part: Any, key: Any) -> Any:
        with vocab_parallel.parallel(self.vocabulary_axis, self.vocabulary_sizes):
            return self.model.prefix(ends, part, fold(key, 0))  # type: ignore[attr-defined]

    def suffix(self, ends: Any, x: Any, part: Any, key: Any) -> Any:
        with vocab_parallel.parallel(self.vocabulary_axis, self.vocabulary_sizes):
            return self.model.suffix(ends, x, part, fold(key, self.length + 1))  # type: ignore[attr-defined]

    def chunk(self, weights: Any, x: Any, context: Any) -> Any:
        key, number = context
        pairs = list(zip(*weights, strict=True))
        keys = [fold(key, number * self.depth + k + 1) for k in range(self.depth)]

        def fetch(pairs: Any) -> list[Any]:
            return [self.fetch(self.leaves[STACK], pair) for pair in pairs]

        def layers(weights: Any, x: Any, keys: Any) -> Any:
            for layer, key in zip(weights, keys, strict=True):
                x = self.model.block(layer, x, key)  # type: ignore[attr-defined]
            return x

        # Between the forward and the backward pass lies the stash, so nothing can be merged that is to be kept apart.
        run = checkpointed(fetch, layers, self.checkpointing, regather=False, unrolled=False)
        every = self.interval_in_use
        for k in range(0, self.depth, every):
            x = run(pairs[k : k + every], x, keys[k : k + every])
        return x


class SwitchedGradients(PipelineGradients):
    """Layers that are no stack, or one that the stages do not divide: each has all at hand and switches to its own.

    What that costs: the parameters, and the sum of their gradients, whole on every stage; activations padded to the
    largest; a stage's forward pass again in its backward pass. The parameters in use are one tree, a stack a list.
    """

    @property
    def layer_by_layer(self) -> bool:
        return False

    def _cut(self) -> None:
        remat = self.config.activation_checkpointing
        if remat and (remat.cpu_checkpointing or remat.policy in ("matmuls", "none")):
            self._refuse(
                f"activation_checkpointing = {remat}", "layers in no stack that the stages divide are always recomputed"
            )
        if self.config.stack.unroll is False:
            self._refuse("stack.unroll = false", "the layers of a pipeline are always unrolled")
        self.checkpointing, self.depth, self.layer_axis = ActivationCheckpointing(policy="full"), 1, False
        self.unrolled, whole = self.stacked, self.leaves
        if self.stacked:
            whole = {ENDS: self.leaves[ENDS], STACK: [self.leaves[STACK]] * self.length}
        self.used = {ENDS: {}, STACK: [whole]}
        self.boundaries = self.model.boundaries(self.parts)  # type: ignore[attr-defined]

    def describe(self, micro_batches: int) -> str:
        return f"{self._summary(micro_batches)}; layers cut at {self.boundaries}, each stage switches to its own"

    def fallback(self) -> str:
        """What the report says of it."""
        why = "no run of equal layers holds half of the parameters"
        if self.stacked:
            why = f"stages x chunks = {self.parts} does not divide the {self.length} equal layers"
        interval = ", in one piece whatever activation_checkpoint_interval says" if self.interval > 1 else ""
        return (
            f"pipeline: {why}, so every stage has all parameters and the sum of their gradients, and computes its "
            f"layers again in the backward pass{interval}"
        )

    def spread(self, masters: Any) -> Any:
        return {ENDS: {}, STACK: [Gradients.spread(self, masters)]}

    def collect(self, used: Any) -> Any:
        return Gradients.collect(self, used[STACK][0])

    def functions(self, pairs: Any, part: Any) -> Functions:
        def whole(weights: Any) -> Any:
            return self.fetch(self.used[STACK][0], [tree[0] for tree in weights])

        params = jax.eval_shape(lambda: whole([pair[STACK] for pair in pairs]))
        pack, run, loss = switched(self.model, self.boundaries, params, part)  # type: ignore[arg-type]

        def prefix(ends: Any, part: Any, key: Any) -> Any:
            return pack(part)

        def chunk(weights: Any, x: Any, context: Any) -> Any:
            key, number = context
            return run(whole(weights), x, number, key)

        def suffix(ends: Any, x: Any, part: Any, key: Any) -> Any:
            return loss(x, part, key)

        return prefix, chunk, suffix
