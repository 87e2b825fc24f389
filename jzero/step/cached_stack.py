"""The layer stack in generation: each layer with its cache, in a scan, in sequence, or in a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jzero.layout.sharding import stack_length
from jzero.mesh import PIPE
from jzero.model import STACK
from jzero.passes.stack import fetch_params
from jzero.pipeline.carry import from_stage, select, send
from jzero.spread.spread_model import on_group
from jzero.step.setup import Setup
from jzero.tree import PyTree, leading_dim

Layers = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # (x, cache) -> (x, cache)
WeightPair = tuple[PyTree, PyTree]  # (diff, nondiff)
Make = Callable[[int], PyTree]  # columns -> an empty cache


def cached_layer(setup: Setup) -> Callable[[WeightPair, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Make `layer((diff, nondiff), x, cache) -> (x, cache)`."""
    model, layouts, precision = on_group(setup.model, setup.mesh, setup.layouts), setup.layouts[STACK], setup.precision
    gathers = any(layout.by_layer for layout in jax.tree.leaves(layouts))

    def layer(pair: WeightPair, x: PyTree, cache: PyTree) -> tuple[PyTree, PyTree]:
        if gathers:  # in every pass: without the barrier XLA gathers all layers once, before the loop
            pair, x = lax.optimization_barrier((pair, x))
        return model.decode_block(fetch_params(layouts, pair, precision), x, cache)

    return layer


def through_layers(setup: Setup, layer: Callable, pair: WeightPair, make: Make, length: int) -> tuple[Layers, PyTree]:
    """Make the function that runs all layers, and an empty cache."""
    layers = stack_length(setup.layouts)
    if isinstance(pair[0], list):
        return partial(_in_sequence, layer, list(zip(*pair, strict=True))), [make(length) for _ in range(layers)]

    def run(x: PyTree, cache: PyTree) -> tuple[PyTree, PyTree]:
        return lax.scan(lambda x, item: layer(item[0], x, item[1]), x, (pair, cache))

    return run, jax.tree.map(lambda c: jnp.broadcast_to(c, (layers, *c.shape)), make(length))


def through_stages(setup: Setup, layer: Callable, pair: WeightPair, make: Make, length: int) -> tuple[Layers, PyTree]:
    """Make the function that runs the chunks of all stages, and an empty cache of this stage's layers.

    The stages take turns. They all compute in every turn, because they would wait anyway. What a stage computes before
    its turn is wrong. After its turn it keeps its input, and writes the same into the same columns again: so a large
    cache is updated in place. What has no columns (the state of a recurrent layer) is selected.
    """
    stages, chunks, in_place = setup.mesh.shape[PIPE], setup.config.pipeline.chunks, _has_columns(make, length)
    stage = lax.axis_index(PIPE)
    layers: list[list[WeightPair]] = [list(zip(*pair, strict=True))]
    if setup.passes.view.layer_axis:
        pieces = [[jax.tree.map(lambda w, i=i: w[i], one) for one in layers[0]] for i in range(leading_dim(pair))]
        n = len(pieces) // chunks
        layers = [[one for piece in pieces[c * n : (c + 1) * n] for one in piece] for c in range(chunks)]

    def kept(mine: jax.Array, new: PyTree, old: PyTree) -> PyTree:
        leaves = zip(in_place, *map(jax.tree.leaves, (new, old)), strict=True)
        return jax.tree.unflatten(jax.tree.structure(new), [x if has else select(mine, x, y) for has, x, y in leaves])

    def run(x: PyTree, cache: PyTree) -> tuple[PyTree, PyTree]:
        def turn(t: jax.Array, carry: PyTree, chunk: list[WeightPair]) -> PyTree:
            x, y, cache = carry
            x = select(stage == t, send(y, +1, stages=stages, wraps=True), x)
            y, new = _in_sequence(layer, chunk, x, cache)
            return x, y, [kept(stage == t, *both) for both in zip(new, cache, strict=True)]

        y, new = x, []
        for chunk, of_chunk in zip(layers, cache, strict=True):
            x, y, of_chunk = lax.fori_loop(0, stages, partial(turn, chunk=chunk), (x, y, of_chunk))
            new.append(of_chunk)
        return from_stage(stage == stages - 1, y), new

    return run, [[make(length) for _ in chunk] for chunk in layers]


def _in_sequence(
    layer: Callable, pairs: list[WeightPair], x: PyTree, cache: list[PyTree]
) -> tuple[PyTree, list[PyTree]]:
    new = []
    for pair, of_layer in zip(pairs, cache, strict=True):
        x, of_layer = layer(pair, x, of_layer)
        new.append(of_layer)
    return x, new


def _has_columns(make: Make, length: int) -> list[bool]:
    """Return, for each leaf of a cache, whether it has a column for each token."""
    shapes, longer = (jax.tree.leaves(jax.eval_shape(lambda n=n: make(n))) for n in (length, length + 1))  # type: ignore[misc]
    return [x.shape != y.shape for x, y in zip(shapes, longer, strict=True)]
