"""The rules of cuDNN's fused attention: rows and heads are divided, sequences are whole.

Axes that divide the sequence move to the heads for the kernel, by all-to-alls of queries, keys, values and the output
(DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509). Where the devices are more than the key-value heads, several have
the same one.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.spread.rules import WHOLE_ARRAYS, bind, everywhere, rule
from jzero.spread.value import Axes, Dims, Group, Value

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
    """

    rows: Axes
    heads: Axes
    shared: Axes
    at: int
    again: bool

    @property
    def rest(self) -> Axes:
        return self.heads[len(self.shared) :]

    def dims(self, heads: Axes) -> Dims:
        return (self.rows, (), heads, ()) if self.at == 2 else (self.rows, heads, (), ())

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
    if eqn.params["dropout_rate"]:  # each device would draw the same mask for its own heads
        return everywhere(group, eqn, values)
    form = _form(group, eqn, values)
    xs = [_operand(group, form, i, v) for i, v in enumerate(values)]
    with jax.named_scope(WHOLE_ARRAYS) if form.again else contextlib.nullcontext():
        out, *sums = bind(eqn, xs)
    shapes = [v.aval.shape for v in eqn.outvars]
    dims = [form.dims(form.heads), (form.rows, form.heads, ())]
    return [Value(x, s, d) for x, s, d in zip([out, *sums], shapes, dims[: len(shapes)], strict=True)]


@rule("dot_product_attention_bwd_wrapper")
def attention_backward(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    if eqn.params["dropout_rate"]:
        return everywhere(group, eqn, values)
    form = _form(group, eqn, values)
    xs = bind(eqn, [_operand(group, form, i, v) for i, v in enumerate(values)])
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
    """Divide the heads by all axes that divide the heads or the sequence of the queries, or by the first of them."""
    at = 2 if eqn.params["layout"] == 0 else 1
    query, key = group.summed(values[0]), values[1]
    axes = (*query.dims[at], *query.dims[3 - at])
    kv_heads = key.shape[at]
    for n in range(len(axes), -1, -1):
        heads = axes[:n]
        shared = next(heads[:m] for m in range(n, -1, -1) if group.fits(kv_heads, heads[:m]))
        rest = group.degree(heads[len(shared) :])
        if group.fits(query.shape[at], heads) and (rest == 1 or rest % (kv_heads // group.degree(shared)) == 0):
            break
    if heads != axes:
        group.ledger.fall_back()
    return Form(query.dims[0], heads, shared, at, heads != axes)


def _operand(group: Group, form: Form, i: int, v: Value) -> Any:
    if i in _KEYS:
        return _own_head(group, form, group.place(v, form.dims(form.shared)).x)
    if i == _SUMS:
        return group.place(v, (form.rows, form.heads, ())).x
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
