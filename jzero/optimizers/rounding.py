"""Stochastic rounding: up or down at random, so that the mean is the number, and small changes are not lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jzero.values.hash32 import hash32


def to_bfloat16(x: jax.Array, words: jax.Array) -> jax.Array:
    """Round float32 numbers to one of the two nearest bfloat16 numbers, with a probability by its closeness.

    Args:
      x: float32.
      words: random uint32s of the same shape.

    >>> found = to_bfloat16(jnp.full(10000, 1 + 1 / 512), noise((10000,), jax.random.key(0)))
    >>> sorted(set(found.tolist())), 0.7 < float((found == 1).mean()) < 0.8  # bfloat16 has 1 and 1 + 4 / 512
    ([1.0, 1.0078125], True)
    """
    return jnp.where(jnp.isfinite(x), keep_bits(x, words, 7), x).astype(jnp.bfloat16)


def keep_bits(x: jax.Array, words: jax.Array | np.uint32, mantissa: int) -> jax.Array:
    """Round finite float32 numbers up or down to these mantissa bits; towards 0 where the words are 0."""
    dropped = 23 - mantissa
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (words >> np.uint32(32 - dropped))
    return jax.lax.bitcast_convert_type(bits >> np.uint32(dropped) << np.uint32(dropped), jnp.float32)


def noise(shape: tuple[int, ...], key: jax.Array, array: int = 0, number: int = 0) -> jax.Array:
    """Make random uint32s of a shape; their upper bits are the most random.

    They follow from the key, the array's index and the element's place in the whole array, not from how devices divide
    it. They are a hash, which XLA computes in the pass over memory that it makes anyway: `number` 0 and 1 use two
    halves of one hash.
    """
    first, *_, last = jax.random.key_data(key).astype(jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        place = place * np.uint32(size & 0xFFFFFFFF) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    start = first + np.uint32((2 * array + number // 2 + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    words = hash32(hash32(place + hash32(start)) ^ last)
    return words << np.uint32(16) | words >> np.uint32(16) if number % 2 else words
