"""Fused attention of sequences that stay divided: a ring, where there are more devices than heads.

Devices beside each other exchange heads for sequence, as in DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509). They
are a stop of the ring. Keys and values travel from stop to stop, and each device attends to those that pass with its
own queries (Liu et al., arXiv:2310.01889); both together are USP (Fang and Zhao, arXiv:2405.07719).

A causal mask would leave the first stops with little to do. So for the time of the attention each stop gets one part
from the beginning and one from the end of the sequence (zigzag, as in Llama 3's training, arXiv:2407.21783). Whatever
keys pass, half of all pairs are visible then: two products of parts, without a mask, and without a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jzero.spread.rules import bind
from jzero.spread.value import Axes, Group, Value

# The operands of both primitives between the values and, in the backward one, the sums: bias, lengths, offsets, pages.
_BETWEEN = slice(3, 10)
# Of a pass of keys: (part of the queries, part of the keys) if they come from a stop before this one, and if not.
_PLAIN = [((0, 0), (0, 0))]
_CAUSAL = [((1, 0), (1, 0)), ((0, 0), (1, 1))]


class Ring(NamedTuple):
    """How devices share the attention to a divided sequence.

    Attributes:
      eqn: the equation; the parameters of its primitive are scale, layout and mask.
      axes: of the mesh; they divide the sequence.
      near: how many devices beside each other share the heads, and make a stop.
      stops: of the ring.
      at: the dimension of heads in [rows, sequence, heads, width] or [rows, heads, sequence, width].
    """

    group: Group
    eqn: Any
    axes: Axes
    near: int
    stops: int
    at: int

    @property
    def along(self) -> int:
        """The dimension of the sequence."""
        return 3 - self.at

    @property
    def causal(self) -> bool:
        return bool(self.eqn.params["mask_type"].name == "CAUSAL")

    @property
    def stop(self) -> Any:
        """The stop that this device belongs to."""
        return lax.axis_index(self.axes) // self.near


def find_ring(
    group: Group, eqn: Any, values: Sequence[Value], axes: Axes, at: int, heads: int, kv_heads: int
) -> Ring | None:
    """Return the ring over the axes that divide the sequence of the queries, or None if the operands allow none.

    Bias, lengths and offsets, a window and dropout allow none. A causal mask needs two parts at each stop.

    Args:
      eqn, values: of cuDNN's forward or backward attention.
      axes: they divide the sequence, and cannot all divide the heads.
      at: the dimension of heads.
      heads, kv_heads: what one device has of them while the sequence is divided.
    """
    if obstacle(group, eqn, values, axes, at):
        return None
    degree, length, kv_length = group.degree(axes), *(v.shape[3 - at] for v in values[:2])
    shared = (n for n in range(degree, 0, -1) if degree % n == 0 and heads % n == 0)
    near = next(n for n in shared if kv_heads % n == 0 or n % kv_heads == 0)
    ring = Ring(group, eqn, axes, near, degree // near, at)
    uneven = length != kv_length or length % (2 * ring.stops)
    return None if ring.causal and uneven else ring


def obstacle(group: Group, eqn: Any, values: Sequence[Value], axes: Axes, at: int) -> str:
    """Return in words what allows no ring over these axes; "" if nothing does."""
    p = eqn.params
    found = {
        "a mask that is neither causal nor none": p["mask_type"].name not in ("NO_MASK", "CAUSAL"),
        "a window": p["sliding_window_length"],
        "dropout": p["dropout_rate"],
        "a bias or a mask of its own, or lengths of its rows": any(0 not in v.shape for v in values[_BETWEEN]),
        "keys whose length the devices do not divide": not group.fits(values[1].shape[3 - at], axes),
        "a sequence that is not divided": not axes,
        "a division in another order than the mesh's": (  # as lax.ppermute counts devices
            axes != tuple(axis for axis in group.degrees if axis in axes)
        ),
    }
    return next((text for text, there in found.items() if there), "")


# ------------------------------------------------------------------ forward and backward


def forward(ring: Ring, operands: Sequence[Any]) -> list[Any]:
    """Compute the output, and the logarithm of the sum of exponentials of each query [rows, heads, sequence].

    Args:
      operands: what this device holds of those of cuDNN's forward attention.
    """
    q, *kv = (_enter(ring, x) for x in operands[:3])
    attend = partial(_attend, ring, operands[_BETWEEN])
    out, sums = attend([q, *kv], causal=ring.causal, is_training=True)
    total = list(zip(_parts(ring, out.astype(jnp.float32)), _parts(ring, sums, 2), strict=True))
    queries = [_parts(ring, q)]
    for passing, before in _passes(ring, kv):
        keys = [_parts(ring, x) for x in passing]
        for first, second in _CAUSAL if ring.causal else _PLAIN:
            out, sums = attend(_pick(before, queries, keys, first, second), is_training=True)
            for part, here in _places(before, first[0], second[0]):
                total[part] = _merge(ring, total[part], out, jnp.where(here, sums, -jnp.inf))
    out, sums = (jnp.concatenate(x, d) for x, d in zip(zip(*total, strict=True), (ring.along, 2), strict=True))
    return [_leave(ring, out.astype(q.dtype)), _leave(ring, sums, 1, 2)]


def backward(ring: Ring, operands: Sequence[Any]) -> list[Any]:
    """Compute the gradients of queries, keys and values.

    Given the sums over all keys, the output and its gradient, the kernel returns for the keys that pass their parts of
    the gradients. Those of keys and values go back to their stop, and are added there in float32.

    Args:
      operands: what this device holds of those of cuDNN's backward attention.
    """
    *_, sums, out, gradient = operands
    # Without the barrier XLA keeps the keys and values of all passes of the forward pass: those of the whole sequence.
    q, *kv = lax.optimization_barrier([_enter(ring, x) for x in operands[:3]])
    sums, of_queries = _enter(ring, sums, 1, 2), [_enter(ring, x) for x in (out, gradient)]
    attend = partial(_attend, ring, operands[_BETWEEN])
    dq, *total = (x.astype(jnp.float32) for x in attend([q, *kv, sums, *of_queries], causal=ring.causal))
    totals = _parts(ring, dq)
    queries = [_parts(ring, q), _parts(ring, sums, 2), *(_parts(ring, x) for x in of_queries)]
    for step, (passing, before) in enumerate(_passes(ring, kv), 1):
        keys = [_parts(ring, x) for x in passing]
        found = [[jnp.zeros(part.shape, jnp.float32) for part in parts] for parts in keys]
        for first, second in _CAUSAL if ring.causal else _PLAIN:
            dq, *of_keys = attend(_pick(before, queries, keys, first, second))
            for part, here in _places(before, first[0], second[0]):
                totals[part] += jnp.where(here, dq, 0)
            for part, here in _places(before, first[1], second[1]):
                for parts, x in zip(found, of_keys, strict=True):
                    parts[part] += jnp.where(here, x, 0)
        home = (jnp.concatenate(parts, ring.along).astype(x.dtype) for parts, x in zip(found, kv, strict=True))
        total = [x + _send(ring, y, -step) for x, y in zip(total, home, strict=True)]
    gradients = [jnp.concatenate(totals, ring.along), *total]
    return [
        _leave(ring, x.astype(q.dtype), heads=like.shape[ring.at]) for x, like in zip(gradients, operands, strict=False)
    ]


def _attend(ring: Ring, between: Sequence[Any], operands: Sequence[Any], causal: bool = False, **changed: Any) -> Any:
    """Call the kernel on queries, keys, values, and what follows."""
    mask = type(ring.eqn.params["mask_type"])["CAUSAL" if causal else "NO_MASK"]
    return bind(ring.eqn, [*operands[:3], *between, *operands[3:]], mask_type=mask, **changed)


def _merge(ring: Ring, total: tuple[Any, Any], out: Any, sums: Any) -> tuple[Any, Any]:
    """Add the output over other keys; `sums` are the logarithms of their sums, -inf for keys that do not count."""
    before, logs = total
    together = jnp.logaddexp(logs, sums)

    def weight(x: Any) -> Any:
        share = jnp.exp(x - together)[..., None]  # [rows, heads, sequence, 1]
        return share if ring.at == 1 else jnp.swapaxes(share, 1, 2)

    return before * weight(logs) + out * weight(sums), together


# ------------------------------------------------------------------ parts of sequences, and the stops that have them


def _passes(ring: Ring, kv: Sequence[Any]) -> Iterator[tuple[list[Any], Any]]:
    """Yield the keys and values of the other stops, and whether they come from a stop before this one."""
    for step in range(1, ring.stops):
        kv = [_send(ring, x, 1) for x in kv]
        yield kv, ring.stop >= step


def _parts(ring: Ring, x: Any, along: int | None = None) -> list[Any]:
    return list(jnp.split(x, 2, ring.along if along is None else along)) if ring.causal else [x]


def _pick(before: Any, queries: Any, keys: Any, first: tuple[int, int], second: tuple[int, int]) -> list[Any]:
    """Return the kernel's operands: queries, keys, values, and what belongs to the queries."""
    q, *rest = (_choose(before, parts[first[0]], parts[second[0]]) for parts in queries)
    return [q, *(_choose(before, parts[first[1]], parts[second[1]]) for parts in keys), *rest]


def _choose(before: Any, x: Any, y: Any) -> Any:
    return x if x is y else jnp.where(before, x, y)


def _places(before: Any, first: int, second: int) -> list[tuple[int, Any]]:
    """List the parts that results belong to, and whether they do."""
    return [(first, True)] if first == second else [(first, before), (second, ~before)]


def _enter(ring: Ring, x: Any, at: int | None = None, along: int | None = None) -> Any:
    """Give a stop its parts of the sequence, and this device its heads."""
    at, along = (ring.at, ring.along) if at is None or along is None else (at, along)
    if ring.near > 1:
        x = jnp.repeat(x, max(ring.near // x.shape[at], 1), at)  # a key-value head for each device
        x = _exchange(ring, x, at, along)
    if not ring.causal:
        return x
    even, odd = (_move(ring, half, stops) for half, stops in zip(jnp.split(x, 2, along), _zigzag(ring), strict=True))
    is_even = ring.stop % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], along)


def _leave(ring: Ring, x: Any, at: int | None = None, along: int | None = None, heads: int | None = None) -> Any:
    """Undo `_enter`; gradients of heads that several devices had are added."""
    at, along = (ring.at, ring.along) if at is None or along is None else (at, along)
    if ring.causal:
        low, high = jnp.split(x, 2, along)
        is_even = ring.stop % 2 == 0
        halves = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
        back = [sorted(range(ring.stops), key=stops.__getitem__) for stops in _zigzag(ring)]
        x = jnp.concatenate([_move(ring, half, stops) for half, stops in zip(halves, back, strict=True)], along)
    if ring.near > 1:
        x = _exchange(ring, x, along, at)
        if heads and heads < x.shape[at]:
            x = x.reshape(*x.shape[:at], heads, -1, *x.shape[at + 1 :]).sum(at + 1, dtype=jnp.float32).astype(x.dtype)
    return x


def _zigzag(ring: Ring) -> list[list[int]]:
    """Return for each stop where the first half of its part goes, and where the second.

    Of the 2 n halves a stop i gets i and 2 n - 1 - i; of these one is a first half, the other a second.
    """
    n = ring.stops
    return [[min(half, 2 * n - 1 - half) for half in range(start, 2 * n, 2)] for start in (0, 1)]


# ------------------------------------------------------------------ collectives


def _send(ring: Ring, x: Any, step: int) -> Any:
    return _move(ring, x, [(stop + step) % ring.stops for stop in range(ring.stops)])


def _move(ring: Ring, x: Any, stops: Sequence[int]) -> Any:
    """Send x of each stop i to the stop `stops[i]`."""
    if list(stops) == list(range(ring.stops)):
        return x
    _record(ring, "collective-permute", x)
    pairs = [(a * ring.near + i, b * ring.near + i) for a, b in enumerate(stops) for i in range(ring.near)]
    return lax.ppermute(x, ring.axes, pairs)


def _exchange(ring: Ring, x: Any, split: int, concat: int) -> Any:
    """Divide one dimension among the devices of a stop, instead of another."""
    _record(ring, "all-to-all", x)
    groups = [[stop * ring.near + i for i in range(ring.near)] for stop in range(ring.stops)]
    return lax.all_to_all(x, ring.axes, split, concat, axis_index_groups=groups, tiled=True)


def _record(ring: Ring, kind: str, x: Any) -> None:
    ring.group.ledger.move(kind, "+".join(ring.axes), x.shape)
