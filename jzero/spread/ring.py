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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.kernels.trace import Equation
from jzero.spread.rules import bind
from jzero.spread.sharded_array import Axes, ModelGroup, ShardedArray

# The operands of both primitives between the values and, in the backward one, the sums: bias, lengths, offsets, pages.
_BETWEEN = slice(3, 10)
# The products of a pass of keys: the part of the queries, and that of the keys, each for keys of a stop before this one
# and for others.
Pair = tuple[int, int]
_PLAIN: list[tuple[Pair, Pair]] = [((0, 0), (0, 0))]
_CAUSAL: list[tuple[Pair, Pair]] = [((1, 1), (0, 0)), ((0, 1), (0, 1))]


class Ring(NamedTuple):
    """The devices that share the attention to a divided sequence.

    Attributes:
      eqn: the equation; the parameters of its primitive are scale, layout and mask.
      axes: of the mesh; they divide the sequence.
      near: how many devices beside each other share the heads, and make a stop.
      stops: of the ring.
      at: the dimension of heads in [rows, sequence, heads, width] or [rows, heads, sequence, width].
    """

    group: ModelGroup
    eqn: Equation
    axes: Axes
    near: int
    stops: int
    at: int

    @property
    def causal(self) -> bool:
        return bool(self.eqn.params["mask_type"].name == "CAUSAL")

    @property
    def stop(self) -> jax.Array:
        """The stop that this device belongs to."""
        return lax.axis_index(self.axes) // self.near

    def forward(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Compute the output, and the logarithm of the sum of exponentials of each query [rows, heads, sequence].

        Args:
          operands: what this device holds of those of cuDNN's forward attention.
        """
        between, (q, *kv) = operands[_BETWEEN], (self._enter(x) for x in operands[:3])
        out, sums = self._attend(between, [q, *kv], causal=self.causal, is_training=True)
        total = list(zip(self._parts(out.astype(jnp.float32)), self._parts(sums), strict=True))
        queries = [self._parts(q)]
        for passing, before in self._passes(kv):
            keys = [self._parts(x) for x in passing]
            for of_queries, of_keys in self._products:
                operands = _pick(before, queries, keys, of_queries, of_keys)
                out, sums = self._attend(between, operands, is_training=True)
                for part, here in _places(before, of_queries):
                    total[part] = self._merge(total[part], out, jnp.where(here, sums, -jnp.inf))
        out, sums = map(self._joined, zip(*total, strict=True))
        return [self._leave(out.astype(q.dtype)), self._leave(sums)]

    def backward(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Compute the gradients of queries, keys and values.

        Given the sums over all keys, the output and its gradient, the kernel returns for the keys that pass their parts
        of the gradients. Those of keys and values go back to their stop, and are added there in float32.

        Args:
          operands: what this device holds of those of cuDNN's backward attention.
        """
        between, of_queries = operands[_BETWEEN], operands[_BETWEEN.stop :]
        # Without the barrier XLA keeps the keys and values of all passes of the forward pass: of the whole sequence.
        q, *kv = lax.optimization_barrier([self._enter(x) for x in operands[:3]])
        own = [self._enter(x) for x in of_queries]  # sums, output and its gradient
        first = self._attend(between, [q, *kv, *own], causal=self.causal)
        dq, *total = (x.astype(jnp.float32) for x in first)
        totals, queries = self._parts(dq), [self._parts(x) for x in (q, *own)]
        for step, (passing, before) in enumerate(self._passes(kv), 1):
            keys = [self._parts(x) for x in passing]
            found = [[jnp.zeros(part.shape, jnp.float32) for part in parts] for parts in keys]
            for at_queries, at_keys in self._products:
                dq, *dkv = self._attend(between, _pick(before, queries, keys, at_queries, at_keys))
                for part, here in _places(before, at_queries):
                    totals[part] += jnp.where(here, dq, 0)
                for part, here in _places(before, at_keys):
                    for parts, x in zip(found, dkv, strict=True):
                        parts[part] += jnp.where(here, x, 0)
            home = (self._joined(parts).astype(x.dtype) for parts, x in zip(found, kv, strict=True))
            total = [x + self._send(y, -step) for x, y in zip(total, home, strict=True)]
        gradients = zip([self._joined(totals), *total], operands[:3], strict=True)
        return [self._leave(x.astype(q.dtype), like.shape[self.at]) for x, like in gradients]

    def _attend(
        self, between: Sequence[jax.Array], operands: Sequence[jax.Array], causal: bool = False, **changed: Any
    ) -> list[jax.Array]:
        """Call the kernel on queries, keys, values, and what follows."""
        mask = type(self.eqn.params["mask_type"])["CAUSAL" if causal else "NO_MASK"]
        return bind(self.eqn, [*operands[:3], *between, *operands[3:]], mask_type=mask, **changed)

    def _merge(
        self, total: tuple[jax.Array, jax.Array], out: jax.Array, sums: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Add the output over other keys; `sums` are the logarithms of their sums, -inf for keys that do not count."""
        before, logs = total
        together = jnp.logaddexp(logs, sums)

        def weight(x: jax.Array) -> jax.Array:
            share = jnp.exp(x - together)[..., None]  # [rows, heads, sequence, 1]
            return share if self.at == 1 else jnp.swapaxes(share, 1, 2)

        return before * weight(logs) + out * weight(sums), together

    # ---------------------------------------------------------------- parts of sequences, and the stops with them

    @property
    def _products(self) -> list[tuple[Pair, Pair]]:
        return _CAUSAL if self.causal else _PLAIN

    def _passes(self, kv: Sequence[jax.Array]) -> Iterator[tuple[list[jax.Array], jax.Array]]:
        """Yield the keys and values of the other stops, and whether they come from a stop before this one."""
        for step in range(1, self.stops):
            kv = [self._send(x, 1) for x in kv]
            yield kv, self.stop >= step

    def _dims(self, x: jax.Array) -> tuple[int, int]:
        """Return the dimensions of heads and sequence; sums are [rows, heads, sequence]."""
        return (1, 2) if x.ndim == 3 else (self.at, 3 - self.at)

    def _parts(self, x: jax.Array) -> list[jax.Array]:
        return list(jnp.split(x, 2, self._dims(x)[1])) if self.causal else [x]

    def _joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate(parts, self._dims(parts[0])[1])

    def _enter(self, x: jax.Array) -> jax.Array:
        """Give a stop its parts of the sequence, and this device its heads."""
        at, along = self._dims(x)
        if self.near > 1:
            x = jnp.repeat(x, max(self.near // x.shape[at], 1), at)  # a key-value head for each device
            x = self._exchange(x, at, along)
        if not self.causal:
            return x
        even, odd = (self._move(half, stops) for half, stops in zip(self._parts(x), self._zigzag, strict=True))
        is_even = self.stop % 2 == 0
        return self._joined([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)])

    def _leave(self, x: jax.Array, heads: int | None = None) -> jax.Array:
        """Undo `_enter`; gradients of heads that several devices had are added."""
        at, along = self._dims(x)
        if self.causal:
            low, high = self._parts(x)
            is_even = self.stop % 2 == 0
            halves = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
            back = [sorted(range(self.stops), key=stops.__getitem__) for stops in self._zigzag]
            x = self._joined([self._move(half, stops) for half, stops in zip(halves, back, strict=True)])
        if self.near > 1:
            x = self._exchange(x, along, at)
            if heads and heads < x.shape[at]:
                apart = x.reshape(*x.shape[:at], heads, -1, *x.shape[at + 1 :])
                x = apart.sum(at + 1, dtype=jnp.float32).astype(x.dtype)
        return x

    @property
    def _zigzag(self) -> list[list[int]]:
        """For each stop, the stop to which the first half of its part goes; and that of the second.

        Of the 2 n halves a stop i gets i and 2 n - 1 - i; of these one is a first half, the other a second.
        """
        n = self.stops
        return [[min(half, 2 * n - 1 - half) for half in range(start, 2 * n, 2)] for start in (0, 1)]

    # ------------------------------------------------------------------ collectives

    def _send(self, x: jax.Array, step: int) -> jax.Array:
        return self._move(x, [(stop + step) % self.stops for stop in range(self.stops)])

    def _move(self, x: jax.Array, stops: Sequence[int]) -> jax.Array:
        """Send x of each stop i to the stop `stops[i]`."""
        if list(stops) == list(range(self.stops)):
            return x
        self._record("collective-permute", x)
        pairs = [(a * self.near + i, b * self.near + i) for a, b in enumerate(stops) for i in range(self.near)]
        return lax.ppermute(x, self.axes, pairs)

    def _exchange(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        """Divide one dimension among the devices of a stop, instead of another."""
        self._record("all-to-all", x)
        groups = [[stop * self.near + i for i in range(self.near)] for stop in range(self.stops)]
        return lax.all_to_all(x, self.axes, split, concat, axis_index_groups=groups, tiled=True)

    def _record(self, kind: str, x: jax.Array) -> None:
        self.group.traced.move(kind, "+".join(self.axes), x.shape)


def find_ring(
    group: ModelGroup, eqn: Equation, values: Sequence[ShardedArray], axes: Axes, at: int, heads: int, kv_heads: int
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


def obstacle(group: ModelGroup, eqn: Equation, values: Sequence[ShardedArray], axes: Axes, at: int) -> str:
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


# ------------------------------------------------------------------ operands of a product


def _choose(before: jax.Array, parts: Sequence[jax.Array], pair: Pair) -> jax.Array:
    first, second = (parts[i] for i in pair)
    return first if pair[0] == pair[1] else jnp.where(before, first, second)


def _pick(
    before: jax.Array, queries: Sequence[Sequence[jax.Array]], keys: Sequence[Sequence[jax.Array]], of_queries: Pair,
    of_keys: Pair,
) -> list[jax.Array]:  # fmt: skip
    """Return the kernel's operands: queries, keys, values, and what belongs to the queries."""
    q, *rest = (_choose(before, parts, of_queries) for parts in queries)
    return [q, *(_choose(before, parts, of_keys) for parts in keys), *rest]


def _places(before: jax.Array, pair: Pair) -> list[tuple[int, Any]]:
    """List the parts that results belong to, and whether they do."""
    return [(pair[0], True)] if pair[0] == pair[1] else [(pair[0], before), (pair[1], ~before)]
