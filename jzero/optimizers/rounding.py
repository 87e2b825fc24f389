"""Stochastic rounding: up or down at random, so that the mean is the number, and small changes are not lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def round_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 numbers to one of the two nearest bfloat16 numbers, to the nearer more often.

    The random bits of an element depend on the key and its index in the whole array, not on how devices divide it.

    >>> found = round_at_random(jnp.full(10000, 1 + 1 / 512), jax.random.key(0))  # bfloat16 has 1 and 1 + 4 / 512
    >>> sorted(set(found.tolist())), 0.7 < float((found == 1).mean()) < 0.8
    ([1.0, 1.0078125], True)
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)  # below the last bit that bfloat16 has
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
