"""The rules of cuDNN's fused attention: rows and heads are divided, sequences are whole.

Where the devices along an axis are more than the key-value heads, every device computes all heads.
"""

from __future__ import annotations

from typing import Any

from jzero.spread.rules import bind, everywhere, rule
from jzero.spread.value import Axes, Dims, Group, Value

# Operands of both primitives: query, key, value, bias, and lengths and offsets of the rows; the backward one has in
# addition the sums of exponentials, the output and its gradient. An absent operand has no elements.
_BIAS, _SUMS = 3, 10


@rule("dot_product_attention_fwd_wrapper")
def attention_forward(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    if eqn.params["dropout_rate"]:  # each device would draw the same mask for its own heads
        return everywhere(group, eqn, values)
    rows, heads, form = _form(group, eqn, values)
    xs = [group.place(v, form if i < _BIAS else _beside(i, v, rows, heads)).x for i, v in enumerate(values)]
    return _attended(eqn, bind(eqn, xs), rows, heads, form)


@rule("dot_product_attention_bwd_wrapper")
def attention_backward(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    if eqn.params["dropout_rate"]:
        return everywhere(group, eqn, values)
    rows, heads, form = _form(group, eqn, values)

    def dims(i: int, v: Value) -> Dims:
        if i == _SUMS:
            return (rows, heads, ())
        return form if i < _BIAS or i > _SUMS else _beside(i, v, rows, heads)

    xs = [group.place(v, dims(i, v)).x for i, v in enumerate(values)]
    gradients = _attended(eqn, bind(eqn, xs), rows, heads, form)
    for i, v in enumerate(gradients[_BIAS:], _BIAS):  # a bias that several heads or rows share gets the sum of theirs
        placed = _beside(i, values[i], rows, heads)
        missing = tuple(axis for axis in (*rows, *heads) if all(axis not in axes for axes in placed))
        gradients[i] = Value(v.x, v.shape, placed, missing)
    return gradients


def _form(group: Group, eqn: Any, values: list[Value]) -> tuple[Axes, Axes, Dims]:
    """Return the axes of rows and of heads, and how queries, keys and values lie."""
    head = 2 if eqn.params["layout"] == 0 else 1  # [rows, sequence, heads, width], or heads before the sequence
    query, key = group.summed(values[0]), values[1]
    heads = query.dims[head] if group.fits(key.shape[head], query.dims[head]) else ()
    rows = query.dims[0]
    return rows, heads, (rows, (), heads, ()) if head == 2 else (rows, heads, (), ())


def _beside(i: int, v: Value, rows: Axes, heads: Axes) -> Dims:
    """Return how a bias [rows or 1, heads or 1, queries, keys] lies, or lengths [rows, ...]."""
    dims: list[Axes] = [() for _ in v.shape]
    if v.shape and v.shape[0] > 1:
        dims[0] = rows
    if i == _BIAS and len(v.shape) == 4 and v.shape[1] > 1:
        dims[1] = heads
    return tuple(dims)


def _attended(eqn: Any, xs: list[Any], rows: Axes, heads: Axes, form: Dims) -> list[Value]:
    shapes = [v.aval.shape for v in eqn.outvars]
    return [Value(x, s, form if len(s) == 4 else (rows, heads, ())) for x, s in zip(xs, shapes, strict=True)]
