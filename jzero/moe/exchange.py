"""Rows to the devices that have their experts, and back.

Shapes: n devices along the axes, E experts of each, N rows on each, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jzero.moe.rows import Rows, by_slot, dispatch


def exchange(
    x: jax.Array, sizes: jax.Array, axes: tuple[str, ...], *, ragged: bool
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Send each row to the device that has its expert.

    Any device may get all rows, so that the result has n N, most of them empty. Where the backend can, only the rows
    that there are go through the network; elsewhere they are padded.

    Args:
      x: rows [N, D], sorted by expert.
      sizes: rows of each expert of all devices [n E] int32; their sum is at most N.
      axes: of the mesh; none: nothing moves.
      ragged: whether the backend has `lax.ragged_all_to_all` (GPUs and TPUs).

    Returns:
      (rows of this device's experts [n N, D], sorted by expert; rows of each [E]; a function that sends rows in this
      order back: [n N, D] -> [N, D]).
    """
    if not axes:
        return x, sizes, lambda y: y
    n, total = lax.axis_size(axes), len(x)
    everyone = lax.all_gather(sizes, axes).reshape(n, n, -1)  # [from, to, expert]
    me = lax.axis_index(axes)
    theirs = everyone[:, me]  # [from, expert]
    if ragged:
        send, receive, starts = _ragged(everyone.sum(2), axes, total)
    else:
        send, receive, starts = _padded(everyone[me].sum(1), axes, total)
    sort = _by_expert(theirs, starts, n * total)
    return dispatch(send(x), sort), theirs.sum(0), lambda y: receive(dispatch(y, _inverse(sort)))


def _padded(counts: jax.Array, axes: tuple[str, ...], total: int) -> tuple[Callable, Callable, jax.Array]:
    """Send N rows to each device, however many there are; those from device i begin at i N."""
    n = len(counts)
    at = jnp.arange(total)
    to = jnp.searchsorted(jnp.cumsum(counts), at, side="right")  # n: after all
    place = to * total + at - (jnp.cumsum(counts) - counts)[jnp.minimum(to, n - 1)]
    packed = by_slot(jnp.where(to < n, place, -1)[:, None].astype(jnp.int32), n * total)

    def move(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    starts = jnp.arange(n) * total
    return lambda x: move(dispatch(x, packed)), lambda y: dispatch(move(y), _inverse(packed)), starts


def _ragged(matrix: jax.Array, axes: tuple[str, ...], total: int) -> tuple[Callable, Callable, jax.Array]:
    """Send the rows that there are, `matrix` [from, to]; they begin where those of the devices before end."""
    n, me = len(matrix), lax.axis_index(axes)
    sent, received = matrix[me], matrix[:, me]
    starts = jnp.cumsum(received) - received
    before = jnp.cumsum(matrix, axis=0) - matrix  # on device `to`, where rows of `from` begin
    offsets = jnp.cumsum(matrix, axis=1) - matrix  # on device `from`, where rows to `to` begin

    def move(x: jax.Array, rows: int, here: jax.Array, size: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
        # Without the barrier XLA makes the buffers of all layers at the start of the step.
        x, out = lax.optimization_barrier((x, jnp.zeros((rows, x.shape[1]), x.dtype)))
        return lax.ragged_all_to_all(x, out, here, size, there, back, axis_name=axes)

    def forth(x: jax.Array) -> jax.Array:
        return move(x, n * total, offsets[me], sent, before[me], received)

    def back(y: jax.Array) -> jax.Array:
        return move(y, total, starts, received, offsets[:, me], sent)

    # Each is the other's transpose; JAX's own asks the other devices for their offsets.
    return _linear(forth, back), _linear(back, forth), starts


def _linear(f: Callable, transpose: Callable) -> Callable:
    """Make a linear function of rows with this transpose."""
    return lambda x: jax.custom_derivatives.linear_call(lambda _, x: f(x), lambda _, y: transpose(y), (), x)


def _by_expert(theirs: jax.Array, starts: jax.Array, total: int) -> Rows:
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


def _inverse(rows: Rows) -> Rows:
    """Swap what a plan of one row for each token moves from and to."""
    return Rows(rows.row[:, 0], rows.token[:, None])
