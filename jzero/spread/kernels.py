"""The rules of cuDNN's fused attention: rows and heads are divided; sequences are whole, or divided around a ring.

Axes that divide the sequence move to the heads for the kernel, by all-to-alls of queries, keys, values and the output
(DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509). Where the devices are more than the key-value heads, several have
the same one. Where they are more than the query heads, they make a ring (`ring`).
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError
from jzero.spread import ring
from jzero.spread.rules import WHOLE_ARRAYS, bind, everywhere, rule
from jzero.spread.value import Axes, Dims, Group, Value
from jzero.values.kinds import either

# Operands of both primitives: query, key, value, bias, and lengths and offsets of the rows; the backward one has in
# addition the sums of exponentials, the output and its gradient. An absent operand has no elements.
_KEYS, _BIAS, _SUMS = (1, 2), 3, 10


class Form(NamedTuple):
    """How the operands of attention lie.

    Attributes:
      rows, heads: the axes that divide the rows, and the query heads.
      shared: those of `heads` that divide the key-value heads; the devices along the rest have one of them each.
      at: the dimension of heads in [rows, sequence, heads, width] or [rows, heads, sequence, width].
      again: whether some devices compute the same heads.
      ring: the devices that share a divided sequence.
    """

    rows: Axes
    heads: Axes
    shared: Axes
    at: int
    again: bool = False
    ring: ring.Ring | None = None

    @property
    def rest(self) -> Axes:
        return self.heads[len(self.shared) :]

    @property
    def sequence(self) -> Axes:
        return self.ring.axes if self.ring else ()

    def dims(self, heads: Axes) -> Dims:
        return (self.rows, self.sequence, heads, ()) if self.at == 2 else (self.rows, heads, self.sequence, ())

    @property
    def sums(self) -> Dims:
        return self.rows, self.heads, self.sequence

    def beside(self, i: int, v: Value) -> Dims:
        """Return how a bias [rows or 1, heads or 1, queries, keys] lies, or lengths [rows, ...]."""
        dims: list[Axes] = [() for _ in v.shape]
        if v.shape and v.shape[0] > 1:
            dims[0] = self.rows
        if i == _BIAS and len(v.shape) == 4 and v.shape[1] > 1:
            dims[1] = self.heads
        return tuple(dims)


@rule("dot_product_attention_fwd_wrapper")
def attention_forward(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    if _has_dropout(group, eqn):
        return everywhere(group, eqn, values)
    form = _form(group, eqn, values)
    xs = [_operand(group, form, i, v) for i, v in enumerate(values)]
    with jax.named_scope(WHOLE_ARRAYS) if form.again else contextlib.nullcontext():
        found = ring.forward(form.ring, xs) if form.ring else bind(eqn, xs)
    shapes = [v.aval.shape for v in eqn.outvars]  # in evaluation without the sums
    return [Value(x, s, d) for x, s, d in zip(found, shapes, (form.dims(form.heads), form.sums), strict=False)]


@rule("dot_product_attention_bwd_wrapper")
def attention_backward(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    if _has_dropout(group, eqn):
        return everywhere(group, eqn, values)
    form = _form(group, eqn, values)
    operands = [_operand(group, form, i, v) for i, v in enumerate(values)]
    xs = ring.backward(form.ring, operands) if form.ring else bind(eqn, operands)
    gradients = []
    for i, (x, out) in enumerate(zip(xs, eqn.outvars, strict=True)):
        if i == 0:
            gradients.append(Value(x, out.aval.shape, form.dims(form.heads)))
        elif i in _KEYS:
            x = _among_heads(group, form, x, out.aval.shape[form.at])
            gradients.append(Value(x, out.aval.shape, form.dims(form.shared), form.rest))
        else:  # a bias that several heads or rows share gets the sum of theirs
            dims = form.beside(i, values[i])
            missing = tuple(axis for axis in (*form.rows, *form.heads) if all(axis not in axes for axes in dims))
            gradients.append(Value(x, out.aval.shape, dims, missing))
    return gradients


def _form(group: Group, eqn: Any, values: list[Value]) -> Form:
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
        if found := ring.find_ring(group, eqn, values, sequence, at, *own):
            return Form(query.dims[0], heads, of_keys, at, ring=found)
    if only_ring:
        why = ring.obstacle(group, eqn, values, sequence, at) or (
            f"a length of {query.shape[3 - at]}; a causal ring needs a multiple of {2 * group.degree(sequence)}, two "
            "parts for each of its devices"
        )
        raise ConfigError(
            f'context_parallel.attention = "ring": the attention at {_place(group)} has {why}; write "auto", '
            "which then divides the heads"
        )
    if again := fitting < len(axes):
        group.ledger.fall_back()
    return Form(query.dims[0], axes[:fitting], shared[fitting] or (), at, again)


def _too_few_heads(group: Group, heads: Axes, sequence: Axes, sizes: tuple[int, int]) -> str:
    """Describe heads that the axes do not divide, with smaller degrees of the sequence's first axis that would."""
    axis, *others = sequence
    fits = []
    for n in range(2, group.degrees[axis]):
        smaller = Group({**group.degrees, axis: n})
        if _shared(smaller, *sizes, (*heads, axis, *others)) is not None:
            fits.append(f"mesh.{axis} = {n}")
    degrees = " and ".join(f"{name} {group.degrees[name]}" for name in (*heads, *sequence))
    return (
        f'context_parallel.attention = "ulysses": {degrees} do not divide the {sizes[0]} heads, with {sizes[1]} of '
        f"keys and values, of the attention at {_place(group)}; what fits: "
        + either([*fits, '"auto", which adds a ring where it can'])
    )


def _place(group: Group) -> str:
    return group.ledger.line or "an unknown line"


def _has_dropout(group: Group, eqn: Any) -> bool:
    """Return whether attention drops weights: each device would draw the same mask for its own heads."""
    if eqn.params["dropout_rate"] and group.attention != "auto":
        raise ConfigError(
            f'context_parallel.attention = "{group.attention}": the attention at {_place(group)} has dropout, which '
            'every device computes for all heads; write "auto", or train without'
        )
    return bool(eqn.params["dropout_rate"])


def _shared(group: Group, heads: int, kv_heads: int, axes: Axes) -> Axes | None:
    """Return which of the axes that divide the query heads divide the key-value heads too; None if they divide none."""
    shared = next(axes[:m] for m in range(len(axes), -1, -1) if group.fits(kv_heads, axes[:m]))
    rest = group.degree(axes[len(shared) :])
    fits = group.fits(heads, axes) and (rest == 1 or rest % (kv_heads // group.degree(shared)) == 0)
    return shared if fits else None


def _operand(group: Group, form: Form, i: int, v: Value) -> Any:
    if i in _KEYS:
        return _own_head(group, form, group.place(v, form.dims(form.shared)).x)
    if i == _SUMS:
        return group.place(v, form.sums).x
    dims = form.dims(form.heads) if i == 0 or i > _SUMS else form.beside(i, v)
    return group.place(v, dims).x


def _first_head(group: Group, form: Form, heads: int) -> Any:
    """Return which of the key-value heads this device attends to, if `rest` divides its query heads further."""
    return lax.axis_index(form.rest) * heads // group.degree(form.rest)


def _own_head(group: Group, form: Form, x: Any) -> Any:
    if not form.rest or x.shape[form.at] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, _first_head(group, form, x.shape[form.at]), 1, form.at)


def _among_heads(group: Group, form: Form, x: Any, kv_heads: int) -> Any:
    """Return the gradient of all key-value heads that `shared` leaves, zero but for this device's."""
    heads = kv_heads // group.degree(form.shared)
    if not form.rest or heads == 1:
        return x
    whole = jnp.zeros((*x.shape[: form.at], heads, *x.shape[form.at + 1 :]), x.dtype)
    return lax.dynamic_update_slice_in_dim(whole, x, _first_head(group, form, heads), form.at)
