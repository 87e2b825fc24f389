"""Tokens as the rows of the experts' products, and back.

A plan of rows is a pair of index arrays, each the inverse of the other: the token that is in a row [M], and the rows
in which a token is [T, k]. With both, gathers and their transposes are gathers; JAX's own transpose is a scatter with
additions, which is slow on GPUs.

Shapes: T tokens, k experts of a token, M rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class TokenRows(NamedTuple):
    """Attributes:
    token: the token in each row [M] int32; T: the row is empty.
    row: the rows of each token [T, k] int32; M: it has no row, for this choice.
    """

    token: jax.Array
    row: jax.Array


def by_expert(experts: jax.Array, count: int) -> tuple[TokenRows, jax.Array]:
    """Sort the choices by expert: all of them get a row.

    Args:
      experts: of each token [T, k] int32, below `count`; others get the last rows, after all groups.
      count: the number of experts.

    Returns:
      (the plan, the rows of each expert [count] int32).
    """
    tokens, k = experts.shape
    order = jnp.argsort(jnp.minimum(experts, count).ravel(), stable=True).astype(jnp.int32)
    # The inverse permutation, by a scatter to distinct places instead of a second sort.
    row = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    sizes = (experts.ravel()[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    row = jnp.where(experts < count, row.reshape(tokens, k), order.size)
    # Else XLA divides again for each number that it gathers by these indices.
    return TokenRows(*lax.optimization_barrier((order // k, row))), sizes


def by_slot(row: jax.Array, rows: int) -> TokenRows:
    """Make a plan from known rows [T, k]; a number outside 0 to `rows` - 1 means no row."""
    tokens, k = row.shape
    row = jnp.where((row >= 0) & (row < rows), row, rows)
    of_choice = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], (tokens, k))
    token = jnp.full(rows, tokens, jnp.int32).at[row].set(of_choice, mode="drop")
    return TokenRows(token, row)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Look up rows; an index past the end gives zeros."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: jax.Array, rows: TokenRows) -> jax.Array:
    """Copy tokens [T, D] to their rows [M, D]; empty rows are zero."""
    return _take(x, rows.token)


def _dispatch_backward(rows: TokenRows, gradient: jax.Array) -> tuple[jax.Array, TokenRows]:
    # The k gradients of a token are added in float32, and rounded once.
    return _take(gradient, rows.row).sum(1, dtype=_wide(gradient)).astype(gradient.dtype), _no_gradient(rows)


dispatch.defvjp(lambda x, rows: (dispatch(x, rows), rows), _dispatch_backward)


@jax.custom_vjp
def combine_experts(y: jax.Array, weights: jax.Array, rows: TokenRows) -> jax.Array:
    """Sum a token's rows of y [M, D], times its weights [T, k] float32, in float32: [T, D] in the dtype of y."""
    return jnp.einsum("tkd,tk->td", _take(y, rows.row).astype(_wide(y)), weights).astype(y.dtype)


def _combine_backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, TokenRows]:
    y, weights, rows = residuals
    in_rows = _take(gradient, rows.token)
    count = rows.row.size
    # The weight of a row: of the choice that has it.
    of_row = jnp.zeros(y.shape[0], weights.dtype).at[rows.row.reshape(count)].set(weights.reshape(count), mode="drop")
    dy = (in_rows * of_row[:, None]).astype(y.dtype)
    dots = (y.astype(_wide(y)) * in_rows.astype(_wide(y))).sum(1)
    return dy, _take(dots, rows.row).astype(weights.dtype), _no_gradient(rows)


combine_experts.defvjp(lambda *operands: (combine_experts(*operands), operands), _combine_backward)


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _no_gradient(rows: TokenRows) -> TokenRows:
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), rows)


def exchange(
    x: jax.Array, sizes: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Send each row to the device that has its expert.

    Args:
      x: rows [N, D], sorted by expert.
      sizes: rows of each expert of all devices [n E] int32; their sum is at most N.
      axes: of the mesh; none: nothing moves.

    Returns:
      (rows of this device's experts [n N, D], sorted by expert; rows of each [E]; a function that sends rows in this
      order back: [n N, D] -> [N, D]).
    """
    if not axes:
        return x, sizes, lambda y: y
    # Any device may get all rows, so that the result has n N, most of them empty, and N go from each device to each.
    # XLA's ragged all-to-all would send only the occupied ones; with it, steps that fit their GPUs ran out of memory,
    # or took 5.8 times as long (jax 0.11.2, experiments/benchmarks/2026-11-25-mixtures-h100.md).
    n, total = lax.axis_size(axes), len(x)
    everyone = lax.all_gather(sizes, axes).reshape(n, n, -1)  # [from, to, expert]
    me = lax.axis_index(axes)
    theirs = everyone[:, me]  # [from, expert]
    send, receive = _padded(everyone[me].sum(1), axes, total)
    sort = _by_expert(theirs, jnp.arange(n) * total, n * total)
    return dispatch(send(x), sort), theirs.sum(0), lambda y: receive(dispatch(y, _inverse(sort)))


def _padded(counts: jax.Array, axes: tuple[str, ...], total: int) -> tuple[Callable, Callable]:
    """Make the functions that send N rows to each device, however many there are, and back; device i's begin at i N."""
    n = len(counts)
    at = jnp.arange(total)
    to = jnp.searchsorted(jnp.cumsum(counts), at, side="right")  # n: after all
    place = to * total + at - (jnp.cumsum(counts) - counts)[jnp.minimum(to, n - 1)]
    packed = by_slot(jnp.where(to < n, place, -1)[:, None].astype(jnp.int32), n * total)

    def move(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    return lambda x: move(dispatch(x, packed)), lambda y: dispatch(move(y), _inverse(packed))


def _by_expert(theirs: jax.Array, starts: jax.Array, total: int) -> TokenRows:
    """Sort received rows by expert: from each device they come sorted, and begin at `starts`."""
    flat = theirs.ravel()  # (from, expert), in the order in which rows came
    ends = jnp.cumsum(theirs, axis=1)
    first = (starts[:, None] + ends - theirs).ravel()  # where each pair's rows are
    to = jnp.cumsum(theirs.T.ravel()) - theirs.T.ravel()  # where they go: (expert, from)
    to = to.reshape(theirs.T.shape).T.ravel()
    at = jnp.arange(total)
    pair = jnp.searchsorted(first, at, side="right") - 1
    # Pairs without rows begin where the next one does: the last of them is found, and it has rows, if any has.
    inside = at - first[pair]
    place = jnp.where((pair >= 0) & (inside < flat[pair]), to[pair] + inside, -1)
    return by_slot(place[:, None].astype(jnp.int32), total)


def _inverse(rows: TokenRows) -> TokenRows:
    """Swap what a plan of one row for each token moves from and to."""
    return TokenRows(rows.row[:, 0], rows.token[:, None])
