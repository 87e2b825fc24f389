"""Pipeline stages: the passes of a mesh with `pipe` > 1.

`_stack_stages` cuts a layer stack: every stage holds its own chunks of layers. `_switched_stages` is for layers without
a stack, or with one that the stages do not divide: every stage holds all parameters and switches to its own layers. Its
cost: whole parameters and gradient sums on every stage, activations padded to the largest, and a second forward pass of
every stage in its backward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero.config import ActivationCheckpointing, Config
from jzero.errors import ConfigError
from jzero.gradients import Facts, Passes, Weights
from jzero.loss import Sums, read_loss, read_sums
from jzero.mesh import GROUP_AXES, PIPE, degrees_text, present
from jzero.model import ENDS, STACK, StackModel, fold, replace_state, stack_functions, suffix_key
from jzero.pipeline import vocab_parallel
from jzero.pipeline.chunk_placement import from_chunks, to_chunks
from jzero.pipeline.executor import Execution, Functions, Stages
from jzero.pipeline.layer_switch import switched
from jzero.pipeline.module import PipelineModule
from jzero.pipeline.program import make_program, passes
from jzero.pipeline.schedules import forward_only, make_schedule
from jzero.precision import Precision, cast
from jzero.remat import Remat, checkpointed
from jzero.sharding import is_state, stack_length
from jzero.spread.model import on_group
from jzero.stack import StackView, fetch, scanned, unrolled
from jzero.tree import PyTree, leading_dim, path_name
from jzero.values.kinds import either
from jzero.zero import ParamLayout

# Layers of a program, over all of its phases. XLA takes about 0.7 CPU seconds for each, and an estimated step is 5 to
# 12 % shorter than with a loop (experiments/benchmarks): 8B on 2 stages (64) unrolls, 70B on 4 (80) does not.
UNROLL_LIMIT = 72


@dataclass(frozen=True)
class _Cut:
    """A model cut into stages.

    Attributes:
      view: the form of the parameters.
      functions: what a tick calls.
      facts, summary: for the report.
      pieces: see `executor.Stages`.
      owned: replaces every leaf of the state by that of the stage that computed it.
    """

    view: StackView
    functions: Callable[[Any, PyTree], Functions]
    facts: Facts
    summary: str
    pieces: int = 1
    owned: Callable[[PyTree], PyTree] = lambda state: state


def pipelined(
    model: Any, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision, read: Callable | None = None
) -> Passes:
    """Make the passes that send the micro-batches through the stages in the order of the schedule.

    Args:
      model: with a layer stack, or a `PipelineModule`.
      read: as for `gradients.sequential`.

    Raises:
      ConfigError: a model that cannot be cut, or not into this number of stages.
    """
    n_stages, chunks = mesh.shape[PIPE], config.pipeline.chunks
    parts = n_stages * chunks
    switches = isinstance(model, PipelineModule) and (not model.stack or len(model.stack) % parts)
    cut = (_switched_stages if switches else _stack_stages)(model, config, mesh, layouts, precision)
    read = read or partial(read_sums, model)
    stages = Stages(
        n_stages, chunks, cut.view, precision, partial(read_loss, model), read, cut.functions, cut.facts.remat.offload,
        cut.pieces,
    )  # fmt: skip

    def schedule(micro_batches: int) -> Any:
        return make_schedule(config.pipeline.schedule, n_stages, micro_batches, chunks)

    def gradients(weights: Weights, batch: PyTree, key: jax.Array, cotangent: jax.Array, first: Any = 0) -> Any:
        program = make_program(schedule(leading_dim(batch)))
        summed, seen, state = Execution(stages, program, weights, batch, key, first, cotangent).result()

        # All stages compute the ends' gradients; only the first stage's counts, so that all agree.
        def once(layout: ParamLayout, g: Any) -> Any:
            return g if g is None or layout.on_pipe else _first(g)

        summed = {**summed, ENDS: jax.tree.map(once, cut.view.layouts[ENDS], summed[ENDS])}
        return summed, _agreed(seen), cut.owned(state)

    def losses(weights: Weights, batch: PyTree, key: jax.Array | None, first: Any = 0) -> Sums:
        program = make_program(forward_only(n_stages, leading_dim(batch), chunks))
        return _agreed(Execution(stages, program, weights, batch, key, first).result()[1])

    def line(micro_batches: int) -> str:
        made = schedule(micro_batches)
        return (
            f"{n_stages} stages{f' x {chunks} chunks' if chunks > 1 else ''}, {made.name}: {made.ticks} ticks for "
            f"{micro_batches} micro-batches, bubble {made.bubble():.1%}, at most {made.in_flight.max()} chunks in "
            f"flight; {cut.summary}"
        )

    return Passes(cut.view, replace(cut.facts, always_sums=True, pipeline=line), gradients, losses)


def _first(x: jax.Array) -> jax.Array:
    """Keep x on the first stage, zero it on the others."""
    return jnp.where(lax.axis_index(PIPE) == 0, x, 0)


def _agreed(seen: Sums) -> Sums:
    """Broadcast the first stage's sums to every stage."""
    return jax.tree.map(lambda x: lax.psum(_first(x), PIPE).astype(x.dtype), seen)


def _refuse(key: str, stages: int, why: str) -> None:
    raise ConfigError(f"{key} with mesh.pipe = {stages}: {why}; leave it out")


# ------------------------------------------------------------------ a stack that the stages divide


def _stack_stages(model: StackModel, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision) -> _Cut:
    stages, chunks = mesh.shape[PIPE], config.pipeline.chunks
    remat = Remat.resolve(config, model, False, mesh)
    _check_stack(model, config, layouts, stages)
    length = stack_length(layouts)
    depth = length // (stages * chunks)
    every = min(remat.interval or 1, depth)
    unrolls = _unrolls(config, stages, depth, every)
    piece = depth if unrolls else every  # layers
    view = _piece_view(layouts, stages, chunks, depth // piece, piece, precision)
    vocabulary = divided_vocabulary(layouts)

    first, block, last = stack_functions(
        on_group(model, mesh, layouts, config.context_parallel.attention, config.fp8.enabled)
    )

    def prefix(ends: PyTree, part: PyTree, key: Any) -> Any:
        with vocab_parallel.parallel(*vocabulary):
            return first(ends, part, fold(key, 0))

    def suffix(ends: PyTree, x: Any, part: PyTree, key: Any) -> Any:
        with vocab_parallel.parallel(*vocabulary):
            return last(ends, x, part, suffix_key(model, key, length))

    def fetch_layers(pairs: Any) -> list[Any]:
        return [fetch(layouts[STACK], pair, precision) for pair in pairs]

    def layers(weights: Any, x: Any, keys: Any) -> Any:
        states = []
        for layer, key in zip(weights, keys, strict=True):
            x, state = block(layer, x, key)
            states.append(state)
        return x, states

    # The stash separates the forward from the backward pass, so XLA cannot merge them: no barrier is needed.
    run = checkpointed(fetch_layers, layers, remat, unrolled=False)

    def run_piece(weights: Any, state: Any, x: Any, context: Any) -> Any:
        (diff, nondiff), (key, number) = weights, context
        pairs = list(zip(diff, replace_state(nondiff, state), strict=True))
        keys = [fold(key, number * piece + k + 1) for k in range(piece)]
        states: list[Any] = []
        for k in range(0, piece, every):
            x, new = run(pairs[k : k + every], x, keys[k : k + every])
            states += new
        return x, states

    ends = "divided among the stages" if vocabulary[0] else "computed by all stages together"
    facts = Facts(remat, length, unrolled=unrolls, by_layer=True, layers_per_checkpoint=every)
    summary = f"{depth} layer{'s' * (depth > 1)} a chunk, prefix and suffix {ends}"
    return _Cut(view, lambda pairs, part: (prefix, run_piece, suffix), facts, summary, depth // piece)


def divided_vocabulary(layouts: PyTree) -> tuple[str | None, set[int]]:
    """Return the arguments of `vocab_parallel.parallel` for these parameters."""
    divided = [layout for layout in jax.tree.leaves(layouts[ENDS]) if layout.on_pipe]
    return PIPE if divided else None, {size for layout in divided for size in layout.shape}


def _check_stack(model: Any, config: Config, layouts: PyTree, stages: int) -> None:
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


def _unrolls(config: Config, stages: int, depth: int, every: int) -> bool:
    """Return whether the layers of a chunk are unrolled: `stack.unroll`; by default up to `UNROLL_LIMIT` layers.

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
    return depth * passes(make_program(schedule).runs) <= UNROLL_LIMIT


def _piece_view(layouts: PyTree, stages: int, chunks: int, pieces: int, depth: int, precision: Precision) -> StackView:
    """View a stage's part of the stack as a list of the `depth` layers of a piece of a chunk.

    With several pieces on a stage a leaf keeps a leading axis for them, chunk by chunk. With several chunks the layers
    move between stages: see `chunk_placement`.
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

    def moved_in(layout: ParamLayout, x: Any) -> Any:
        return x if x is None or layout.state else x.astype(precision.reduce)

    in_use = {ENDS: layouts[ENDS], STACK: [layouts[STACK]] * depth}
    return StackView(in_use, split, merge, layer_axis=several)


# ------------------------------------------------------------------ other layers


def _switched_stages(model: PipelineModule, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision) -> _Cut:
    stages, chunks = mesh.shape[PIPE], config.pipeline.chunks
    if axes := present(mesh, *GROUP_AXES):
        raise ConfigError(
            f"{degrees_text(mesh, axes)} with mesh.pipe = {stages} and layers of {model!r} in no stack that the stages "
            "divide: not yet supported; make more of the layers alike, choose a number of stages that divides them, or "
            "leave one out"
        )
    if config.fp8.enabled:
        _refuse("fp8.enabled = true", stages, "fp8 multiplies the weights of a stack that the stages divide")
    section = config.activation_checkpointing
    asked = Remat.resolve(config, model, False, mesh)
    if section and section.policy in ("matmuls", "none"):
        why = "layers in no stack that the stages divide are always recomputed"
        _refuse(f'activation_checkpointing.policy = "{section.policy}"', stages, why)
    if config.stack.unroll is False:
        _refuse("stack.unroll = false", stages, "layers in no stack that the stages divide are always unrolled")
    section = ActivationCheckpointing(policy="full", cpu_checkpointing=asked.offload)
    remat = Remat(section, asked.interval, regather=False)
    stacked = isinstance(model, StackModel)
    whole = unrolled(layouts) if stacked else scanned(layouts)
    view = StackView(  # one tree, where the executor expects a list of layers
        {ENDS: {}, STACK: [whole.layouts]},
        lambda params: {ENDS: {}, STACK: [whole.split(params)]},
        lambda gradients: whole.merge(gradients[STACK][0]),
        layer_axis=False,
    )
    boundaries = model.boundaries(stages * chunks)

    def functions(pairs: Any, part: PyTree) -> Functions:
        def everything(weights: Any) -> Any:
            return fetch(whole.layouts, tuple(tree[0] for tree in weights), precision)  # type: ignore[arg-type]

        params = jax.eval_shape(lambda: everything([pair[STACK] for pair in pairs]))
        pack, run, loss = switched(model, boundaries, params, part, is_state(whole.layouts), remat.offload)

        def chunk(weights: Any, state: Any, x: Any, context: Any) -> Any:
            (diff, nondiff), (key, number) = weights, context
            params = everything((diff, replace_state(nondiff, state)))
            x, new = run(params, x, number, key)
            return x, [new]

        return (lambda ends, part, key: (pack(part), {})), chunk, (lambda ends, x, part, key: (loss(x, part, key), {}))

    def owned(state: PyTree) -> PyTree:
        def of_its_stage(path: tuple, x: jax.Array) -> jax.Array:
            stage = (bisect_right(boundaries, model.layer_index(path_name(path))) - 1) % stages
            return lax.psum(jnp.where(lax.axis_index(PIPE) == stage, x, jnp.zeros_like(x)), PIPE).astype(x.dtype)

        return {**state, STACK: [jax.tree_util.tree_map_with_path(of_its_stage, state[STACK][0])]}

    length = stack_length(layouts) if stacked else 0
    why = "no run of equal layers holds half of the parameters"
    if stacked:
        why = f"stages x chunks = {stages * chunks} does not divide the {length} equal layers"
    interval = ", in one piece whatever activation_checkpoint_interval says" if asked.interval > 1 else ""
    fallback = (
        f"pipeline: {why}, so every stage has all parameters and the sum of their gradients, and computes its "
        f"layers again in the backward pass{interval}"
    )
    facts = Facts(remat, length, unrolled=stacked, fallback=fallback)
    return _Cut(view, functions, facts, f"layers cut at {boundaries}, each stage switches to its own", owned=owned)
