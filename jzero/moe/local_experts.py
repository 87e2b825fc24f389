"""What one device computes of a mixture of experts.

Shapes as in `jzero.moe.mixture`; N = T k choices, M rows of the products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.moe.exchange import exchange
from jzero.moe.grouped_product import grouped_dot
from jzero.moe.rows import by_expert, by_slot, combine, dispatch

# The scope of products of padded rows: in "one_row_of_4" every fourth row holds a token, on average.
OCCUPIED = "one_row_of_"


class Tokens(NamedTuple):
    """Tokens x [B, S, D], and as in `Routing` the experts `chosen` [B, S, k], `weights` and `slots`.

    A choice of an expert that is not among those of this call counts nothing.
    """

    x: jax.Array
    chosen: jax.Array
    weights: jax.Array
    slots: jax.Array | None = None


def mixed(
    tokens: Tokens, up: jax.Array, down: jax.Array, capacity: int | None, activation: Callable,
    axes: tuple[str, ...] = (), parts: int = 1,
) -> jax.Array:  # fmt: skip
    """Sum the outputs of each token's experts: [B, S, D].

    Args:
      tokens: the experts that they chose are 0 to n E - 1, in the order of the n devices along `axes`.
      up, down: of this device's experts.
      capacity: tokens of a row that an expert takes; None: all.
      axes: the mesh axes along which devices with other tokens have other experts.
      parts: the devices among which the experts are divided. Without a capacity there is a row for each choice that
        may come to this device, but only one in `parts` comes, if the experts are equally popular.
    """
    rows, (x, chosen, weights) = len(tokens.x), (a.reshape(-1, a.shape[-1]) for a in tokens[:3])
    count = len(up) * (lax.axis_size(axes) if axes else 1)
    if capacity is None:
        plan, sizes = by_expert(chosen, count)
        x, sizes, back = exchange(dispatch(x, plan), sizes, axes)
        with jax.named_scope(f"{OCCUPIED}{parts}") if parts > 1 else contextlib.nullcontext():
            y = _products(partial(grouped_dot, sizes=sizes), x, up, down, activation)
        y = back(y)
    else:
        size = rows * capacity  # of one expert
        plan = by_slot(_row_of_slot(tokens, capacity), count * size)
        x = dispatch(x, plan).reshape(count, size, -1)
        if axes:
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=1, tiled=True)
        y = _products(partial(jnp.einsum, "emd,edf->emf"), x, up, down, activation)
        if axes:
            y = lax.all_to_all(y, axes, split_axis=1, concat_axis=0, tiled=True)
        y = y.reshape(count * size, -1)
    return combine(y, weights, plan).reshape(tokens.x.shape)


def _row_of_slot(tokens: Tokens, capacity: int) -> jax.Array:
    """Number the rows: expert, row of the batch, slot; -1: dropped, or not an expert of this call. [T, k]."""
    rows, _, k = tokens.chosen.shape
    assert tokens.slots is not None  # noqa: S101  # `route` makes them with a capacity
    row = (tokens.chosen * rows + jnp.arange(rows)[:, None, None]) * capacity + tokens.slots
    taken = (tokens.slots >= 0) & (tokens.slots < capacity)
    return jnp.where(taken, row, -1).reshape(-1, k)


def _products(product: Callable, x: jax.Array, up: jax.Array, down: jax.Array, activation: Callable) -> jax.Array:
    """Apply the two products to rows [..., D]."""
    up, down = up.astype(x.dtype), down.astype(x.dtype)
    h = product(x, up.reshape(*up.shape[:2], -1))
    if up.ndim == 4:
        gate, value = jnp.split(h, 2, axis=-1)
        h = activation(gate) * value
    else:
        h = activation(h)
    return product(h, down)
