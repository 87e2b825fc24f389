"""Tokens as the rows of the experts' products, and back.

A plan of rows is a pair of index arrays, each the inverse of the other: the token that is in a row [M], and the rows
in which a token is [T, k]. With both, gathers and their transposes are gathers; JAX's own transpose is a scatter with
additions, which is slow on GPUs.

Shapes: T tokens, k experts of a token, M rows, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rows(NamedTuple):
    """Attributes:
    token: the token in each row [M] int32; T: the row is empty.
    row: the rows of each token [T, k] int32; M: it has no row, for this choice.
    """

    token: jax.Array
    row: jax.Array


def by_expert(experts: jax.Array, count: int) -> tuple[Rows, jax.Array]:
    """Sort the choices by expert: all of them get a row.

    Args:
      experts: of each token [T, k] int32, below `count`; others get the last rows, after all groups.
      count: the number of experts.

    Returns:
      (the plan, the rows of each expert [count] int32).
    """
    tokens, k = experts.shape
    order = jnp.argsort(jnp.minimum(experts, count).ravel(), stable=True).astype(jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    sizes = (experts.ravel()[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    row = jnp.where(experts < count, row.reshape(tokens, k), order.size)
    return Rows(order // k, row), sizes


def by_slot(row: jax.Array, rows: int) -> Rows:
    """Make a plan from known rows [T, k]; a number outside 0 to `rows` - 1 means no row."""
    tokens, k = row.shape
    row = jnp.where((row >= 0) & (row < rows), row, rows)
    of_choice = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], (tokens, k))
    token = jnp.full(rows, tokens, jnp.int32).at[row].set(of_choice, mode="drop")
    return Rows(token, row)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Look up rows; an index past the end gives zeros."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: jax.Array, rows: Rows) -> jax.Array:
    """Copy tokens [T, D] to their rows [M, D]; empty rows are zero."""
    return _take(x, rows.token)


def _dispatch_backward(rows: Rows, gradient: jax.Array) -> tuple[jax.Array, Rows]:
    return _take(gradient, rows.row).sum(1, dtype=_wide(gradient)).astype(gradient.dtype), _no_gradient(rows)


dispatch.defvjp(lambda x, rows: (dispatch(x, rows), rows), _dispatch_backward)


@jax.custom_vjp
def combine(y: jax.Array, weights: jax.Array, rows: Rows) -> jax.Array:
    """Sum a token's rows of y [M, D], times its weights [T, k] float32, in float32: [T, D] in the dtype of y."""
    return jnp.einsum("tkd,tk->td", _take(y, rows.row).astype(_wide(y)), weights).astype(y.dtype)


def _combine_backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, Rows]:
    y, weights, rows = residuals
    in_rows = _take(gradient, rows.token)
    count = rows.row.size
    # The weight of a row: of the choice that has it.
    of_row = jnp.zeros(y.shape[0], weights.dtype).at[rows.row.reshape(count)].set(weights.reshape(count), mode="drop")
    dy = (in_rows * of_row[:, None]).astype(y.dtype)
    dots = (y.astype(_wide(y)) * in_rows.astype(_wide(y))).sum(1)
    return dy, _take(dots, rows.row).astype(weights.dtype), _no_gradient(rows)


combine.defvjp(lambda y, weights, rows: (combine(y, weights, rows), (y, weights, rows)), _combine_backward)


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _no_gradient(rows: Rows) -> Rows:
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), rows)
