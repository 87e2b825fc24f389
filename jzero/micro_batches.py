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


def accumulate(gradient: Callable[[Any, PyTree], tuple[PyTree, Any]], batch: PyTree, like: PyTree, dtype: Any) -> Any:
    """Sum the gradients of all micro-batches, and collect their other results.

        results = [gradient(i, batch[i]) for i in range(accum)]
        return sum(g for g, _ in results), stack(aux for _, aux in results)

    in a scan, so that one micro-batch's activations and one sum are alive.

    Args:
      gradient: (index, micro-batch) -> (gradients, aux).
      batch: micro-batches [accum, micro, ...].
      like: a tree with the shapes of the gradients.
      dtype: of the sum. A single micro-batch is not summed and keeps its own dtype.
    """
    accum = leading_dim(batch)
    if accum == 1:
        gradients, aux = gradient(0, jax.tree.map(lambda x: x[0], batch))
        return gradients, jax.tree.map(lambda x: x[None], aux)

    def body(summed: PyTree, item: Any) -> tuple[PyTree, Any]:
        gradients, aux = gradient(*item)
        return jax.tree.map(lambda s, g: s + g.astype(s.dtype), summed, gradients), aux

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), like)
    return lax.scan(body, empty, (jnp.arange(accum), batch))
