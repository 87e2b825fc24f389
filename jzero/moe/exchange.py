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
    x: jax.Array, sizes: jax.Array, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Send each row to the device that has its expert.

    Any device may get all rows, so that the result has n N, most of them empty, and N go from each device to each.
    XLA's ragged all-to-all would send only the occupied ones; with it, steps that fit their GPUs ran out of memory, or
    took 5.8 times as long (jax 0.11.2, experiments/benchmarks/2026-11-25-mixtures-h100.md).

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
