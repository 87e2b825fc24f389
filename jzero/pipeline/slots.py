"""The buffers in which a stage keeps arrays between ticks: trees with a leading axis of slots."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero._compat import memory_view

HOST_SPACE, DEVICE_SPACE = jax.memory.Space.Host, jax.memory.Space.Device


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def buffer(slots: int, shapes: Any, on_host: bool = False) -> Any:
    """Make slots for arrays of these shapes. Floats stay uninitialised: a value read too early is dropped.

    Args:
      shapes: ShapeDtypeStructs, or types as from `jax.typeof`: those of host memory get their slots there.
      on_host: put the slots of all floats in host memory.
    """

    def one(x: Any) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if (on_host and floating) or getattr(x, "memory_space", None) == HOST_SPACE:
            # A view of constants: XLA allocates the buffer on the host and never fills it. JAX's scans do the same.
            return memory_view(jnp.zeros((slots, *x.shape), x.dtype), HOST_SPACE)
        return (lax.empty if floating else jnp.zeros)((slots, *x.shape), x.dtype)

    return jax.tree.map(one, shapes)


def write(buffer: Any, slot: jax.Array, x: Any) -> Any:
    """Write x into a slot, and move it to the memory of the buffer first."""

    def one(b: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(b, _to(jax.typeof(b).memory_space, x), slot, 0)

    return jax.tree.map(one, buffer, x)


def read(buffer: Any, slot: jax.Array) -> Any:
    """Read a slot; the result lies in the memory of the buffer."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, keepdims=False), buffer)


def on_device(x: Any) -> Any:
    """Copy the arrays of a tree that lie in host memory to the device."""
    return jax.tree.map(partial(_to, DEVICE_SPACE), x)


def _to(space: Any, x: jax.Array) -> jax.Array:
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
