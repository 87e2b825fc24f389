"""The empty cache of generation; on groups of devices, each holds its part of what `tensor` divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jzero.spread.spread_model import SpreadModel
from jzero.tree import PyTree

Make = Callable[[int], PyTree]  # columns -> an empty cache


def sharded_cache(model: Any, make: Make, decode: Callable[[PyTree], PyTree], length: int) -> Make:
    """Divide a cache over `tensor` as a pass leaves it: keys and values by their heads, as the layer computes them.

    Args:
      model: from `on_group`.
      make: makes a cache that is whole.
      decode: one token's pass, cache -> cache.
      length: the columns to try.

    Returns:
      A function as `make`; of a group's cache, it returns `Value`s.
    """
    if not isinstance(model, SpreadModel):
        return make
    found = jax.eval_shape(lambda: decode(make(length)))
    return lambda length: model.divide(make(length), like=found)


def has_columns(make: Make, length: int) -> list[bool]:
    """Return, for each leaf of a cache, whether it has a column for each token."""
    shapes, longer = (jax.tree.leaves(jax.eval_shape(lambda n=n: make(n))) for n in (length, length + 1))  # type: ignore[misc]
    return [x.shape != y.shape for x, y in zip(shapes, longer, strict=True)]
