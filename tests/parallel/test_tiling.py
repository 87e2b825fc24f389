"""Functions of a sequence, tile by tile: plain JAX's values and gradients, and no array of the whole in between."""

from collections import Counter
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tensor_models import batches, make_step

import jzero
from jzero.planner.traced_operations import FORWARD, RECOMPUTED, moves
from jzero.tracing.equations import operations

ROWS, LENGTH, WIDTH, WORDS = 2, 24, 8, 48


def operands(dtype=np.float32, length=LENGTH):
    rng = np.random.default_rng(0)
    head, x = rng.normal(size=(WIDTH, WORDS)), rng.normal(size=(ROWS, length, WIDTH))
    return jnp.asarray(head, dtype), jnp.asarray(x, dtype), jnp.asarray(rng.integers(0, WORDS, (ROWS, length)))


def losses(head, x, labels):
    logits = jax.nn.log_softmax((x @ head).astype(jnp.float32))
    return -jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]


def in_tiles(head, x, labels, tiles=4):
    return jzero.tiled(lambda part: losses(head, *part), (x, labels), tiles)


@pytest.mark.parametrize("tiles", [1, 4, LENGTH])
def test_values_and_gradients(tiles):
    head, x, labels = operands()

    def total(f, *weights):
        return jnp.sum(jnp.sin(f(*weights, labels)))

    def with_gradients(f):
        return lambda *weights: (f(*weights, labels), *jax.grad(lambda *w: total(f, *w), (0, 1))(*weights))

    expected = jax.jit(with_gradients(losses))(head, x)
    by_tiles = with_gradients(partial(in_tiles, tiles=tiles))
    for run in (by_tiles, jax.jit(by_tiles)) if tiles == 4 else (jax.jit(by_tiles),):  # eager code hoists weights too
        for a, b in zip(run(head, x), expected, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_another_axis_and_trees():
    _, x, labels = operands()
    found = jzero.tiled(lambda x: {"a": 2 * x["x"], "b": x["n"]}, {"x": x[0], "n": labels[0]}, 3, axis=0)
    np.testing.assert_array_equal(found["a"], 2 * x[0])
    np.testing.assert_array_equal(found["b"], labels[0])


def test_logits_of_one_tile_exist():
    def largest(f):
        jaxpr = jax.make_jaxpr(jax.grad(lambda *args: f(*args).sum(), (0, 1)))(*operands()).jaxpr
        return max(prod(v.aval.shape) for one in operations(jaxpr) for v in one.eqn.outvars)

    assert largest(losses) == ROWS * LENGTH * WORDS
    assert largest(in_tiles) < ROWS * LENGTH * WORDS // 2


def test_gradients_of_weights_are_added_in_float32():
    """Of many tiles in bfloat16; added in bfloat16, as a scan does, they would be off by more than 0.02."""
    length = 4096
    head, x, labels = operands(jnp.bfloat16, length)

    def gradient(f, dtype=jnp.bfloat16):
        grad = jax.jit(jax.grad(lambda head: f(head, x.astype(dtype), labels).sum()))
        return np.asarray(grad(head.astype(dtype)), np.float32)

    exact = gradient(losses, np.float32)
    found = gradient(lambda *args: in_tiles(*args, tiles=256))
    assert np.abs(found - exact).max() < 0.01 * np.abs(exact).max()


def test_tiles_move_the_same_bytes():
    """What `tensor` gathers is gathered once more, with what is computed again."""

    def moved(name):
        step = make_step(name, precision={"bf16": {"enabled": True}}, unroll=False, context=2, tensor=2)
        found, total = moves(step.trace(batches(name)[0]), step.mesh), Counter()
        assert not found.whole
        for move in found.all:
            total[move.kind, move.axes, move.part] += move.total
        return total

    plain, tiled = moved("llama"), moved("tiled")
    again = {key: tiled.pop(key) for key in [*tiled] if key[2] == RECOMPUTED}
    assert tiled == plain
    assert {axis for _, axes, _ in again for axis in axes} <= {"tensor"}
    assert all(size <= plain[kind, axes, FORWARD] for (kind, axes, _), size in again.items())
