"""The placement of an interleaved pipeline's layers, between steps and inside a step.

Between steps the layer stack is sharded over the stages in the model's order, stage s holding the s-th part, so that
states and checkpoints are the same for every schedule. Inside a step stage s works on the slices s, S + s, 2S + s, ...
of the S*V slices. Slice j moves from stage j // V to stage j % S. This takes V permutes; every stage sends one slice in
each.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.mesh import PIPE


class Round(NamedTuple):
    """A permute: `pairs` (from, to), and by stage the slice it sends and the place of the slice it receives."""

    pairs: list[tuple[int, int]]
    sends: np.ndarray
    puts: np.ndarray


def rounds(stages: int, chunks: int) -> list[Round]:
    """List the permutes from the model's order to the chunks' places.

    In round r stage d sends its slice (r + d*g // S) mod V with g = gcd(V, S): d*V takes every multiple of g modulo S
    once for each value of d*g // S, so that no two stages send to the same stage.
    """
    result, stage = [], np.arange(stages)
    for r in range(chunks):
        sends = (r + stage * gcd(chunks, stages) // stages) % chunks
        slices = stage * chunks + sends
        puts = np.empty(stages, int)
        puts[slices % stages] = slices // stages
        result.append(Round(list(zip(stage.tolist(), (slices % stages).tolist(), strict=True)), sends, puts))
    return result


def to_chunks(x: jax.Array, stages: int, chunks: int) -> jax.Array:
    """Convert a stage's part of a stacked leaf, in the model's order [V*K, ...], to its chunks [V, K, ...]."""
    x = x.reshape(chunks, -1, *x.shape[1:])
    if chunks % stages == 0:  # every stage sends equally much to every other: one all-to-all
        x = x.reshape(-1, stages, *x.shape[1:])
        return lax.all_to_all(x, PIPE, split_axis=1, concat_axis=0).reshape(chunks, *x.shape[2:])
    return _exchange(x, [(pairs, sends, puts) for pairs, sends, puts in rounds(stages, chunks)])


def from_chunks(x: jax.Array, stages: int, chunks: int) -> jax.Array:
    """Invert `to_chunks`."""
    if chunks % stages == 0:
        x = x.reshape(stages, -1, *x.shape[1:])
        x = lax.all_to_all(x, PIPE, split_axis=0, concat_axis=1)
    else:
        x = _exchange(x, [([(b, a) for a, b in pairs], puts, sends) for pairs, sends, puts in rounds(stages, chunks)])
        x = x[None]
    return x.reshape(-1, *x.shape[3:])


def _exchange(x: jax.Array, rounds: list) -> jax.Array:
    stage, out = lax.axis_index(PIPE), jnp.zeros_like(x)
    for pairs, sends, puts in rounds:
        slice_ = lax.dynamic_index_in_dim(x, jnp.asarray(sends)[stage], keepdims=False)
        got = lax.ppermute(slice_, PIPE, pairs)
        out = lax.dynamic_update_index_in_dim(out, got, jnp.asarray(puts)[stage], 0)
    return out
