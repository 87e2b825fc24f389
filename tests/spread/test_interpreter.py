"""What `jzero.spread` lists of a function: its collectives with source lines, and what ran on whole arrays."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from helpers.spreading import SUM, check

from jzero.spread import MovedArray

RNG = np.random.default_rng(0)
COLUMNS, ROWS = ((None, 1), True), ((None, 0), True)
SEQUENCE = ((None, 1), False)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def feed_forward(x, up, down):
    h = jnp.tanh(x @ up)
    return x + h @ down


LINE = inspect.getsourcelines(feed_forward)[1]


def test_a_feed_forward_layer_moves_what_megatrons_does():
    """Sequence parallelism falls out: one all-gather into the layer, one reduce-scatter out of it."""
    group = check(feed_forward, [normal(2, 8, 4), normal(4, 8), normal(8, 4)], [SEQUENCE, COLUMNS, ROWS])
    assert group.traced.moves[:2] == [
        MovedArray("all-gather", "b", (2, 8, 4), f"test_interpreter.py:{LINE + 1}", "dot_general"),
        MovedArray("reduce-scatter", "b", (2, 8, 4), f"test_interpreter.py:{LINE + 2}", "add"),
    ]
    assert not group.traced.fallbacks


def test_queries_keys_and_values_share_one_gather():
    def three(x, q, k, v):
        return x @ q * (x @ k) + x @ v

    group = check(three, [normal(2, 8, 4), *(normal(4, 8) for _ in range(3))], [SEQUENCE, COLUMNS, COLUMNS, COLUMNS])
    first = group.traced.moves[: len(group.traced.moves) // 2]
    assert [move.kind for move in first if move.primitive] == ["all-gather"]


def test_a_primitive_without_a_rule_runs_on_whole_arrays_and_is_listed():
    def unruled(x):
        return jax.scipy.special.gammainc(2.0, x**2 + 1)

    group = check(unruled, [normal(4, 8)], [((0, 1), False)])
    assert {fallback.primitive for fallback in group.traced.fallbacks} == {"igamma"}
    assert group.traced.fallbacks[0].line.startswith("test_interpreter.py:")
    whole = check(unruled, [normal(4, 8)], [((None, None), False)]).traced
    assert not whole.fallbacks
    assert not whole.moves


def test_updates_of_zeros_run_on_shards():
    """JAX puts a `reshard` before them."""
    rows = np.array([1, 5, 0, 3], np.int32)
    forms = [((1, None), False), ((None, None), False)]
    assert not check(lambda u, i: jnp.zeros((8, 4)).at[i].add(u), [normal(4, 4), rows], forms).traced.fallbacks


def test_a_sum_is_made_once_and_scaled_before():
    moves = check(lambda x: (x / 2).sum() / 3, [normal(4, 8)], [((SUM, 1), False)]).traced.moves
    assert [(move.kind, move.shape) for move in moves[: len(moves) // 2]] == [("all-reduce", ()), ("all-reduce", ())]
