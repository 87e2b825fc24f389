"""Stochastic rounding: up or down at random, so that the mean is the number, and small changes are not lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jzero.values.hash32 import hash32


def round_at_random(x: jax.Array, key: jax.Array, number: int = 0) -> jax.Array:
    """Round float32 numbers to one of the two nearest bfloat16 numbers, with a probability by its closeness.

    The random bits of an element follow from the key, the array's number and the element's place in the whole array,
    not from how devices divide it. They are a hash, which XLA computes in the pass over memory that it makes anyway.

    >>> found = round_at_random(jnp.full(10000, 1 + 1 / 512), jax.random.key(0))  # bfloat16 has 1 and 1 + 4 / 512
    >>> sorted(set(found.tolist())), 0.7 < float((found == 1).mean()) < 0.8
    ([1.0, 1.0078125], True)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    first, *_, last = jax.random.key_data(key).astype(jnp.uint32)
    noise = hash32(first + np.uint32(number * 0x9E3779B9 & 0xFFFFFFFF))
    for dim in range(x.ndim):
        noise = hash32(noise ^ jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim))
    noise = hash32(noise ^ last) >> 16  # below the last bit that bfloat16 has
    rounded = jax.lax.bitcast_convert_type((bits + noise) & np.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
