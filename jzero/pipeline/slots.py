"""The buffers in which a stage keeps arrays between ticks: trees with a leading axis of slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def buffer(slots: int, shapes: Any) -> Any:
    """Make slots for arrays of these shapes. Floats stay uninitialised: a value read too early is dropped."""

    def one(x: Any) -> jax.Array:
        make = lax.empty if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros
        return make((slots, *x.shape), x.dtype)

    return jax.tree.map(one, shapes)


def write(buffer: Any, slot: jax.Array, x: Any) -> Any:
    return jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x, slot, 0), buffer, x)


def read(buffer: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)
