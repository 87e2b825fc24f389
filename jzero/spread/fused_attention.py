"""The rules of cuDNN's fused attention: rows and heads are divided; sequences are whole, or divided around a ring.

Axes that divide the sequence move to the heads for the kernel, by all-to-alls of queries, keys, values and the output
(DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509). Where the devices are more than the key-value heads, several have
the same one. Where they are more than the query heads, they make a ring (`ring`).
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.kernels.trace import Equation
from jzero.spread.ring import Ring, find_ring, obstacle
from jzero.spread.rules import WHOLE_ARRAYS, bind, replicated, rule
from jzero.spread.sharded_array import Axes, Dims, ModelGroup, ShardedArray
from jzero.values.kinds import either

# Operands of both primitives: query, key, value, bias, and lengths and offsets of the rows; the backward one has in
# addition the sums of exponentials, the output and its gradient. An absent operand has no elements.
_KEYS, _BIAS, _SUMS = (1, 2), 3, 10


class AttentionDivision(NamedTuple):
    """The division of attention's operands.

    Attributes:
      rows, heads: the axes that divide the rows, and the query heads.
      shared: those of `heads` that divide the key-value heads; the devices along the rest have one of them each.
      at: the dimension of heads in [rows, sequence, heads, width] or [rows, heads, sequence, width].
      again: whether some devices compute the same heads.
      ring: the devices that share a divided sequence.
    """

    group: ModelGroup
    rows: Axes
    heads: Axes
    shared: Axes
    at: int
    again: bool = False
    ring: Ring | None = None

    @property
    def rest(self) -> Axes:
        return self.heads[len(self.shared) :]

    def dims(self, i: int, v: ShardedArray) -> Dims:
        """Return the division of operand i: of gradients and outputs too."""
        sequence = self.ring.axes if self.ring else ()
        if i == _SUMS:
            return self.rows, self.heads, sequence
        if _KEYS[-1] < i < _SUMS:  # a bias [rows or 1, heads or 1, queries, keys], or lengths [rows, ...]
            by_rows = self.rows if v.shape and v.shape[0] > 1 else ()
            by_heads = self.heads if i == _BIAS and len(v.shape) == 4 and v.shape[1] > 1 else ()
            return (by_rows, by_heads, *((),) * len(v.shape))[: len(v.shape)]
        heads = self.shared if i in _KEYS else self.heads
        return (self.rows, sequence, heads, ()) if self.at == 2 else (self.rows, heads, sequence, ())

    def local(self, i: int, v: ShardedArray) -> jax.Array:
        """Return what the kernel gets of operand i: of keys and values the one head that this device attends to."""
        x = self.group.place(v, self.dims(i, v)).x
        if i not in _KEYS or not self.rest or x.shape[self.at] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, self._first_head(x.shape[self.at]), 1, self.at)

    def gradient(self, i: int, x: jax.Array, v: ShardedArray) -> ShardedArray:
        """Return the gradient of operand i; a head or a bias that several devices share gets the sum of theirs."""
        dims = self.dims(i, v)
        if i not in _KEYS:
            sums = tuple(axis for axis in (*self.rows, *self.heads) if all(axis not in axes for axes in dims))
            return ShardedArray(x, v.shape, dims, sums)
        heads = v.shape[self.at] // self.group.degree(self.shared)
        if self.rest and heads > 1:  # of all heads that `shared` leaves, zero but for this device's
            every = jnp.zeros((*x.shape[: self.at], heads, *x.shape[self.at + 1 :]), x.dtype)
            x = lax.dynamic_update_slice_in_dim(every, x, self._first_head(heads), self.at)
        return ShardedArray(x, v.shape, dims, self.rest)

    def _first_head(self, heads: int) -> jax.Array:
        """Return the key-value head that this device attends to, if `rest` divides its query heads further."""
        return lax.axis_index(self.rest) * heads // self.group.degree(self.rest)


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
def cudnn_attention(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    if _has_dropout(group, eqn):
        return replicated(group, eqn, values)
    form = _form(group, eqn, values)
    xs = [form.local(i, v) for i, v in enumerate(values)]
    if len(values) > _SUMS:
        gradients = form.ring.backward(xs) if form.ring else bind(eqn, xs)
        return [form.gradient(i, x, values[i]) for i, x in enumerate(gradients)]
    with jax.named_scope(WHOLE_ARRAYS) if form.again else contextlib.nullcontext():
        found = form.ring.forward(xs) if form.ring else bind(eqn, xs)
    divided = (form.dims(i, values[0]) for i in (0, _SUMS))  # in evaluation without the sums
    return [ShardedArray(x, v.aval.shape, dims) for x, v, dims in zip(found, eqn.outvars, divided, strict=False)]


def _form(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> AttentionDivision:
    """Divide the heads by all axes that divide the heads or the sequence of the queries.

    If they do not divide them, or `group.attention` is "ring", those of the sequence make a ring. If that is not
    possible, divide by the first axes.

    Raises:
      ConfigError: `group.attention` asks for what these operands do not allow.
    """
    at = 2 if eqn.params["layout"] == 0 else 1
    query, key = group.summed(values[0]), values[1]
    heads, sequence = query.dims[at], query.dims[3 - at]
    axes, sizes = (*heads, *sequence), (query.shape[at], key.shape[at])
    shared = {n: _shared(group, *sizes, axes[:n]) for n in range(len(axes) + 1)}
    fitting = max(n for n, found in shared.items() if found is not None)
    only_ring = group.attention == "ring" and sequence != ()
    if group.attention == "ulysses" and sequence and fitting < len(axes):
        raise ConfigError(_too_few_heads(group, heads, sequence, sizes))
    if (fitting < len(axes) or only_ring) and (of_keys := shared[len(heads)]) is not None:
        rest = group.degree(heads[len(of_keys) :])
        own = query.shape[at] // group.degree(heads), key.shape[at] // group.degree(of_keys) if rest == 1 else 1
        own = (1, 1) if only_ring else own  # no devices beside each other share heads
        if found := find_ring(group, eqn, values, sequence, at, *own):
            return AttentionDivision(group, query.dims[0], heads, of_keys, at, ring=found)
    if only_ring:
        why = obstacle(group, eqn, values, sequence, at) or (
            f"a length of {query.shape[3 - at]}; a causal ring needs a multiple of {2 * group.degree(sequence)}, two "
            "parts for each of its devices"
        )
        raise ConfigError(
            f'context_parallel.attention = "ring": the attention at {_place(group)} has {why}; write "auto", '
            "which then divides the heads"
        )
    if again := fitting < len(axes):
        group.traced.fall_back()
    return AttentionDivision(group, query.dims[0], axes[:fitting], shared[fitting] or (), at, again)


def _too_few_heads(group: ModelGroup, heads: Axes, sequence: Axes, sizes: tuple[int, int]) -> str:
    """Describe heads that the axes do not divide, with smaller degrees of the sequence's first axis that would."""
    axis, *others = sequence
    fits = []
    for n in range(2, group.degrees[axis]):
        smaller = ModelGroup({**group.degrees, axis: n})
        if _shared(smaller, *sizes, (*heads, axis, *others)) is not None:
            fits.append(f"mesh.{axis} = {n}")
    degrees = " and ".join(f"{name} {group.degrees[name]}" for name in (*heads, *sequence))
    return (
        f'context_parallel.attention = "ulysses": {degrees} do not divide the {sizes[0]} heads, with {sizes[1]} of '
        f"keys and values, of the attention at {_place(group)}; what fits: "
        + either([*fits, '"auto", which adds a ring where it can'])
    )


def _place(group: ModelGroup) -> str:
    return group.traced.line or "an unknown line"


def _has_dropout(group: ModelGroup, eqn: Equation) -> bool:
    """Return whether attention drops weights: each device would draw the same mask for its own heads."""
    if eqn.params["dropout_rate"] and group.attention != "auto":
        raise ConfigError(
            f'context_parallel.attention = "{group.attention}": the attention at {_place(group)} has dropout, which '
            'every device computes for all heads; write "auto", or train without'
        )
    return bool(eqn.params["dropout_rate"])


def _shared(group: ModelGroup, heads: int, kv_heads: int, axes: Axes) -> Axes | None:
    """Return which of the axes that divide the query heads divide the key-value heads too; None if they divide none."""
    shared = next(axes[:m] for m in range(len(axes), -1, -1) if group.fits(kv_heads, axes[:m]))
    rest = group.degree(axes[len(shared) :])
    fits = group.fits(heads, axes) and (rest == 1 or rest % (kv_heads // group.degree(shared)) == 0)
    return shared if fits else None
