"""Pipeline stages: the passes of a mesh with `pipe` > 1.

`_stack_stages` cuts a layer stack: every stage holds its own chunks of layers. `layer_switch` is for layers without
a stack, or with one that the stages do not divide: every stage holds all parameters and switches to its own layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.config import Config
from jzero.errors import ConfigError
from jzero.layout.sharding import ParamLayout, PlacedModel, stack_length
from jzero.loss import Mean, Sums, read_loss, read_sums
from jzero.mesh import PIPE
from jzero.model import ENDS, STACK, StackModel, fold, replace_state, stack_functions, suffix_key
from jzero.passes.remat import Remat, checkpointed
from jzero.passes.sequential import DeviceWeights, Passes, PassFacts, Read
from jzero.passes.stack import StackView, fetch_params
from jzero.pipeline import vocab_parallel
from jzero.pipeline.executor import Cut, Execution, Index, MicroBatches, Stages
from jzero.pipeline.layer_switch import switched_stages
from jzero.pipeline.module import PipelineModule
from jzero.pipeline.schedules import PipelineSchedule, forward_only, make_program, make_schedule, passes
from jzero.precision import Precision
from jzero.spread.spread_model import on_group
from jzero.tree import PyTree, cast, leading_dim
from jzero.values.kinds import either

# Layers of a program, over all of its phases. XLA takes about 0.7 CPU seconds for each, and an estimated step is 5 to
# 12 % shorter than with a loop (experiments/benchmarks): 8B on 2 stages (64) unrolls, 70B on 4 (80) does not.
PROGRAM_LAYERS = 72


Gradients = tuple[PyTree, Sums, PyTree]  # gradients, the loss and metrics of every micro-batch, the new state


def pipelined(placed: PlacedModel, read: Read | None = None) -> Passes:
    """Make the passes that send the micro-batches through the stages in the order of the schedule.

    Args:
      placed: a model with a layer stack, or a `PipelineModule`.
      read: as for `passes.sequential.sequential`.

    Raises:
      ConfigError: a model that cannot be cut, or not into this number of stages.
    """
    model, config = placed.model, placed.config
    n_stages, chunks = placed.mesh.shape[PIPE], config.pipeline.chunks
    parts = n_stages * chunks
    switches = isinstance(model, PipelineModule) and (not model.stack or len(model.stack) % parts)
    cut = (switched_stages if switches else _stack_stages)(placed)
    read = read or partial(read_sums, model)
    stages = Stages(n_stages, chunks, cut, placed.precision, partial(read_loss, model), read)

    def schedule(micro_batches: int) -> PipelineSchedule:
        return make_schedule(config.pipeline.schedule, n_stages, micro_batches, chunks)

    def gradients(
        weights: DeviceWeights, batch: PyTree, key: jax.Array, cotangents: Mean, first: Index = 0
    ) -> Gradients:
        program = make_program(schedule(leading_dim(batch)))
        summed, seen, state = Execution(stages, program, weights, MicroBatches(batch, key, first), cotangents).result()

        # All stages compute the ends' gradients; only the first stage's counts, so that all agree.
        def once(layout: ParamLayout, g: jax.Array | None) -> jax.Array | None:
            return g if g is None or layout.on_pipe else _only_first_stage(g)

        summed = {**summed, ENDS: jax.tree.map(once, cut.view.layouts[ENDS], summed[ENDS])}
        return summed, _agreed(seen), cut.owned(state)

    def losses(weights: DeviceWeights, batch: PyTree, key: jax.Array | None, first: Index = 0) -> Sums:
        program = make_program(forward_only(n_stages, leading_dim(batch), chunks))
        return _agreed(Execution(stages, program, weights, MicroBatches(batch, key, first)).result()[1])

    def line(micro_batches: int) -> str:
        made = schedule(micro_batches)
        return (
            f"{n_stages} stages{f' x {chunks} chunks' if chunks > 1 else ''}, {made.name}: {made.ticks} ticks for "
            f"{micro_batches} micro-batches, bubble {made.bubble():.1%}, at most {made.in_flight.max()} chunks in "
            f"flight; {cut.summary}"
        )

    return Passes(cut.view, replace(cut.facts, always_sums=True, pipeline=line), gradients, losses)


def _only_first_stage(x: jax.Array) -> jax.Array:
    """Keep x on the first stage, zero it on the others."""
    return jnp.where(lax.axis_index(PIPE) == 0, x, 0)


def _agreed(seen: Sums) -> Sums:
    """Broadcast the first stage's sums to every stage."""
    return jax.tree.map(lambda x: lax.psum(_only_first_stage(x), PIPE).astype(x.dtype), seen)


# ------------------------------------------------------------------ a stack that the stages divide


def _stack_stages(placed: PlacedModel) -> Cut:
    model, config, layouts, precision = placed.model, placed.config, placed.layouts, placed.precision
    stages, chunks = placed.mesh.shape[PIPE], config.pipeline.chunks
    remat = Remat.resolve(config, model, False, placed.mesh)
    _check_stack(model, config, layouts, stages)
    length = stack_length(layouts)
    depth = length // (stages * chunks)
    every = min(remat.interval or 1, depth)
    unrolls = _unrolls_chunk(config, stages, depth, every)
    piece = depth if unrolls else every  # layers
    view = _piece_view(layouts, stages, chunks, depth // piece, piece, precision)
    vocabulary = divided_vocabulary(layouts)

    first, block, last = stack_functions(
        on_group(model, placed.mesh, layouts, config.context_parallel.attention, config.fp8.enabled)
    )

    def prefix(ends: PyTree, part: PyTree, key: jax.Array | None) -> PyTree:
        with vocab_parallel.parallel(*vocabulary):
            return first(ends, part, fold(key, 0))

    def suffix(ends: PyTree, x: PyTree, part: PyTree, key: jax.Array | None) -> PyTree:
        with vocab_parallel.parallel(*vocabulary):
            return last(ends, x, part, suffix_key(model, key, length))

    def fetch_layers(pair: PyTree) -> list[PyTree]:
        return [fetch_params(layouts[STACK], one, precision) for one in zip(*pair, strict=True)]

    def layers(weights: PyTree, x: PyTree, keys: list[jax.Array | None]) -> PyTree:
        states = []
        for layer, key in zip(weights, keys, strict=True):
            x, state = block(layer, x, key)
            states.append(state)
        return x, states

    # The stash separates the forward from the backward pass, so XLA cannot merge them: no barrier is needed.
    run = checkpointed(fetch_layers, layers, remat, unrolled=False)

    def run_piece(weights: PyTree, state: PyTree, x: PyTree, context: PyTree) -> PyTree:
        (diff, nondiff), (key, number) = weights, context
        pairs = list(zip(diff, replace_state(nondiff, state), strict=True))
        keys = [fold(key, number * piece + k + 1) for k in range(piece)]
        states: list[PyTree] = []
        for k in range(0, piece, every):
            x, new = run(tuple(zip(*pairs[k : k + every], strict=True)), x, keys[k : k + every])
            states += new
        return x, states

    ends = "divided among the stages" if vocabulary[0] else "computed by all stages together"
    facts = PassFacts(remat, length, unrolled=unrolls, by_layer=True, layers_per_checkpoint=every)
    summary = f"{depth} layer{'s' * (depth > 1)} a chunk, prefix and suffix {ends}"
    return Cut(view, lambda pairs, part: (prefix, run_piece, suffix), facts, summary, depth // piece)


def divided_vocabulary(layouts: PyTree) -> tuple[str | None, set[int]]:
    """Return the arguments of `vocab_parallel.parallel` for these parameters."""
    divided = [layout for layout in jax.tree.leaves(layouts[ENDS]) if layout.on_pipe]
    return PIPE if divided else None, {size for layout in divided for size in layout.shape}


def _check_stack(model: object, config: Config, layouts: PyTree, stages: int) -> None:
    """Raise a ConfigError for a model or an option that stages of a stack do not support."""
    chunks = config.pipeline.chunks
    if not isinstance(model, StackModel):
        raise ConfigError(
            f"mesh.pipe = {stages}: {model!r} has no layer stack to cut into stages; name its list of "
            'layers in jzero.from_flax(..., stack="layers"), give it prefix, block, suffix (docs/functional-api.md), '
            "or write it as a jzero.PipelineModule"
        )
    length = stack_length(layouts)
    if length % (stages * chunks):
        fit = [str(n) for n in range(2, length + 1) if length % (n * chunks) == 0]
        use = f"{either(fit)} stages fit with {chunks} chunks each" if fit else "use fewer chunks, or no pipeline"
        raise ConfigError(
            f"mesh.pipe = {stages} stages x pipeline.chunks = {chunks}: must divide the {length} layers of "
            f"{model!r}; {use}"
        )


def _unrolls_chunk(config: Config, stages: int, depth: int, every: int) -> bool:
    """Return whether the layers of a chunk are unrolled: `stack.unroll`; by default up to `PROGRAM_LAYERS` layers.

    A program contains the layers of a chunk in each of its phases, and XLA compiles every one.
    """
    unroll, fits = config.stack.unroll, depth % every == 0
    if unroll is False and not fits:
        raise ConfigError(
            f"stack.unroll = false with mesh.pipe = {stages}: activation_checkpoint_interval = {every} must divide the "
            f"{depth} layers of a chunk; change it, or leave stack.unroll out"
        )
    if unroll != "auto" or not fits:
        return unroll is not False
    # Every number of stages, and of micro-batches if there are enough, has these phases.
    schedule = make_schedule(config.pipeline.schedule, 2, 8, config.pipeline.chunks)
    return depth * passes(make_program(schedule).runs) <= PROGRAM_LAYERS


def _piece_view(layouts: PyTree, stages: int, chunks: int, pieces: int, depth: int, precision: Precision) -> StackView:
    """View a stage's part of the stack as a list of the `depth` layers of a piece of a chunk.

    With several pieces on a stage a leaf keeps a leading axis for them, chunk by chunk. With several chunks the layers
    move between stages: see `to_chunks`.
    """
    moves, several = chunks > 1, chunks * pieces > 1

    def split(params: PyTree) -> PyTree:
        stack = params[STACK]
        if moves:  # moved in the widest dtype that is needed inside, which often is half of the masters'
            dtype = jnp.promote_types(precision.compute, precision.reduce)
            stack = jax.tree.map(lambda layout, m: cast(m, dtype) if layout.trainable else m, layouts[STACK], stack)
            stack = jax.tree.map(lambda m: to_chunks(m, stages, chunks), stack)
        if several:
            stack = jax.tree.map(lambda m: m.reshape(-1, depth, *m.shape[1 + moves :]).swapaxes(0, 1), stack)
        layers = [jax.tree.map(lambda m, k=k: m[k], stack) for k in range(depth)]  # type: ignore[misc]
        return {ENDS: params[ENDS], STACK: layers}

    def merge(gradients: PyTree) -> PyTree:
        def stack(*layers: jax.Array) -> jax.Array:
            whole, rest = jnp.stack(layers, axis=int(several)), layers[0].shape[several:]
            return from_chunks(whole.reshape(chunks, -1, *rest), stages, chunks) if moves else whole.reshape(-1, *rest)

        if moves:
            gradients = {**gradients, STACK: jax.tree.map(moved_in, [layouts[STACK]] * depth, gradients[STACK])}
        return {ENDS: gradients[ENDS], STACK: jax.tree.map(stack, *gradients[STACK])}

    def moved_in(layout: ParamLayout, x: jax.Array | None) -> jax.Array | None:
        return x if x is None or layout.state else x.astype(precision.reduce)

    in_use = {ENDS: layouts[ENDS], STACK: [layouts[STACK]] * depth}
    return StackView(in_use, split, merge, layer_axis=several)


# ------------------------------------------------------------------ the placement of an interleaved pipeline's layers
# Between steps the layer stack is sharded over the stages in the model's order, stage s holding the s-th part, so that
# states and checkpoints are the same for every schedule. Inside a step stage s works on the slices s, S + s, 2S + s,
# and so on, of the S*V slices. Slice j moves from stage j // V to stage j % S. This takes V permutes; every stage sends
# one slice in each.


def _rounds(stages: int, chunks: int) -> Iterator[tuple[list[tuple[int, int]], np.ndarray, np.ndarray]]:
    """Yield the permutes from the model's order to the chunks' places: pairs (from, to), and by stage the slice that it
    sends and the place of the slice that it receives.

    In round r stage d sends its slice (r + d*g // S) mod V with g = gcd(V, S): d*V takes every multiple of g modulo S
    once for each value of d*g // S, so that no two stages send to the same stage.
    """
    stage = np.arange(stages)
    for r in range(chunks):
        sends = (r + stage * gcd(chunks, stages) // stages) % chunks
        slices = stage * chunks + sends
        puts = np.empty(stages, int)
        puts[slices % stages] = slices // stages
        yield list(zip(stage.tolist(), (slices % stages).tolist(), strict=True)), sends, puts


def to_chunks(x: jax.Array, stages: int, chunks: int) -> jax.Array:
    """Convert a stage's part of a stacked leaf, in the model's order [V*K, ...], to its chunks [V, K, ...]."""
    x = x.reshape(chunks, -1, *x.shape[1:])
    if chunks % stages == 0:  # every stage sends equally much to every other: one all-to-all
        x = x.reshape(-1, stages, *x.shape[1:])
        return lax.all_to_all(x, PIPE, split_axis=1, concat_axis=0).reshape(chunks, *x.shape[2:])
    return _exchange(x, _rounds(stages, chunks))


def from_chunks(x: jax.Array, stages: int, chunks: int) -> jax.Array:
    """Invert `to_chunks`."""
    if chunks % stages == 0:
        x = x.reshape(stages, -1, *x.shape[1:])
        x = lax.all_to_all(x, PIPE, split_axis=0, concat_axis=1)
    else:
        back = (([(b, a) for a, b in pairs], puts, sends) for pairs, sends, puts in _rounds(stages, chunks))
        x = _exchange(x, back)[None]
    return x.reshape(-1, *x.shape[3:])


def _exchange(x: jax.Array, rounds: Iterable[tuple]) -> jax.Array:
    stage, out = lax.axis_index(PIPE), jnp.zeros_like(x)
    for pairs, sends, puts in rounds:
        slice_ = lax.dynamic_index_in_dim(x, jnp.asarray(sends)[stage], keepdims=False)
        got = lax.ppermute(slice_, PIPE, pairs)
        out = lax.dynamic_update_index_in_dim(out, got, jnp.asarray(puts)[stage], 0)
    return out
