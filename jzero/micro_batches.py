"""Gradient accumulation: one function over the micro-batches of a batch, its gradients summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.tree import PyTree, leading_dim


def split(batch: PyTree, micro: int) -> PyTree:
    """Split a local batch [accum * micro, ...] into micro-batches [accum, micro, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), batch)


def accumulate(gradient: Callable, batch: PyTree, state: PyTree, like: PyTree, dtype: Any) -> tuple[Any, Any, Any]:
    """Sum the gradients of all micro-batches, collect their other results, and pass the state from one to the next.

        for i in range(accum):
            gradients[i], aux[i], state = gradient(i, batch[i], state)
        return sum(gradients), stack(aux), state

    in a scan, so that one micro-batch's activations and one sum are alive.

    Args:
      gradient: (index, micro-batch, state) -> (gradients, aux, new state).
      batch: micro-batches [accum, micro, ...].
      like: a tree with the shapes of the gradients.
      dtype: of the sum. A single micro-batch is not summed and keeps its own dtype.
    """
    accum = leading_dim(batch)
    if accum == 1:
        gradients, aux, state = gradient(0, jax.tree.map(lambda x: x[0], batch), state)
        return gradients, jax.tree.map(lambda x: x[None], aux), state

    def body(carry: Any, item: Any) -> tuple[Any, Any]:
        summed, state = carry
        gradients, aux, state = gradient(*item, state)
        return (jax.tree.map(lambda s, g: s + g.astype(s.dtype), summed, gradients), state), aux

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), like)
    (summed, state), aux = lax.scan(body, (empty, state), (jnp.arange(accum), batch))
    return summed, aux, state
