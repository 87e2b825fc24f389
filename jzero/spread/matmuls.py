"""Rules of products: matrices and convolutions."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from jzero.kernels.fp8 import matmul
from jzero.kernels.fp8.quantized import Quantized
from jzero.kernels.fusion.chains import form_of
from jzero.kernels.trace import Equation
from jzero.spread.rules import bind, replicated, results, rule, run_local
from jzero.spread.sharded_array import Axes, Dims, ModelGroup, ShardedArray, dequantized

WHOLE_FACTOR = "whole_factor"  # the scope of what is gathered for products of activations: attention without cuDNN


@rule("dot_general")
def dot_general(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Megatron's column and row division, and what lies between.

    Contracted and batch dimensions are divided alike on both sides; a contracted one makes the result partial. Between
    free dimensions that one axis divides, the weight stays and the activation is gathered.
    """
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    a, b = (group.summed(v) for v in values)
    da, db = list(a.dims), list(b.dims)
    taken: set[str] = set()
    free_a = [i for i in range(len(da)) if i not in (*lb, *lc)]
    free_b = [j for j in range(len(db)) if j not in (*rb, *rc)]
    for i, j in [*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)]:
        axes = _either(a, da[i], b, db[j])
        if i in lc and a.weight != b.weight and not (da[i] if a.weight else db[j]):
            # A whole weight stays whole: to move the activation costs less than to sum the product.
            v, free = (b, free_b) if a.weight else (a, free_a)
            axes = _open(axes, {axis for d in free for axis in group.activation_dims(v.shape)[d]})
        da[i] = db[j] = _open(axes, taken)
        taken |= set(da[i])
    for d, free in ((db, free_b), (da, free_a)) if b.weight or not a.weight else ((da, free_a), (db, free_b)):
        for i in free:
            d[i] = _open(d[i], taken)
            taken |= set(d[i])
    for v, d, free in ((a, da, free_a), (b, db, free_b)):
        if not v.weight:
            _rest(group, v, d, free, taken)
    of_activations = lb and not (a.weight or b.weight)
    with jax.named_scope(WHOLE_FACTOR) if of_activations else contextlib.nullcontext():
        a, b = (_placed(group, v, tuple(d)) for v, d in ((a, da), (b, db)))
    dims = (*(da[i] for i in lb), *(da[i] for i in free_a), *(db[j] for j in free_b))
    partial = tuple(axis for i in lc for axis in da[i])
    return results(eqn, _product(group, eqn, a, b), dims, partial, a.weight and b.weight)


def _placed(group: ModelGroup, v: ShardedArray, dims: Dims) -> ShardedArray:
    return group.place(v if v.dims == dims else dequantized(v), dims)


def _product(group: ModelGroup, eqn: Equation, a: ShardedArray, b: ShardedArray) -> list[Any]:
    """Multiply what this device holds: in fp8, if one factor is a weight in fp8 and the other an activation."""
    weight = next((i for i, v in enumerate((a, b)) if isinstance(v.x, Quantized)), None)
    if weight is not None:
        w, x = (a, b)[weight], (a, b)[1 - weight]
        form = form_of(eqn.params["dimension_numbers"], (len(a.shape), len(b.shape)), weight)
        if form and not x.weight and x.x.dtype == w.x.dtype:
            return [matmul.fp8_dot_general(x.x, w.x, form, eqn.outvars[0].aval.dtype, group.casts(x))]
    return bind(eqn, [dequantized(v).x for v in (a, b)])


def _either(a: ShardedArray, da: Axes, b: ShardedArray, db: Axes) -> Axes:
    """Choose how two dimensions that belong together are divided: as a weight, else as the first that is divided."""
    if a.weight != b.weight and (da if a.weight else db):
        return da if a.weight else db
    return da or db


def _open(axes: Axes, taken: set[str]) -> Axes:
    """Keep the major axes that divide nothing else."""
    return tuple(itertools.takewhile(lambda axis: axis not in taken, axes))


def _rest(group: ModelGroup, v: ShardedArray, dims: list[Axes], free: list[int], taken: set[str]) -> None:
    """Move axes of an activation that would be gathered to where activations rest: heads to the sequence."""
    for axis in sorted(v.axes - taken, key=list(group.degrees).index):
        for i in free:
            if axis in group.activation_dims(v.shape)[i] and group.fits(v.shape[i], (*dims[i], axis)):
                dims[i] = (*dims[i], axis)
                taken.add(axis)
                break


@rule("conv_general_dilated")
def convolution(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Rows and features are divided as in a product; images and windows are whole.

    An axis divides groups of features, each with windows of its own, and nothing is summed.
    """
    p, (x, w) = eqn.params, (group.summed(v) for v in values)
    if p["batch_group_count"] != 1:
        return replicated(group, eqn, values)
    count, numbers = p["feature_group_count"], p["dimension_numbers"]
    (rows, features), (out, into) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    contracted: Axes = ()
    if count == 1:
        contracted = _either(x, x.dims[features], w, w.dims[into])
        outputs = _open(w.dims[out], set(contracted))
    else:
        outputs = _either(x, x.dims[features], w, w.dims[out])
        outputs = outputs if group.fits(count, outputs) else ()
        count //= group.degree(outputs)
    of_rows = _open(x.dims[rows], {*contracted, *outputs})
    of_features = contracted if p["feature_group_count"] == 1 else outputs
    x = group.place(x, _dims(x, {rows: of_rows, features: of_features}))
    w = group.place(w, _dims(w, {out: outputs, into: contracted}))
    dims = _dims(x, {numbers.out_spec[0]: of_rows, numbers.out_spec[1]: outputs})
    return run_local(eqn, [x, w], dims, contracted, feature_group_count=count)


def _dims(v: ShardedArray, divided: dict[int, Axes]) -> Dims:
    return tuple(divided.get(d, ()) for d in range(len(v.shape)))


@rule("fft")
def fft(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """The transformed dimensions, the last ones, are whole; what divides them moves to others that it divides."""
    v = group.summed(values[0])
    free = len(v.shape) - len(eqn.params["fft_lengths"])
    dims = [*v.dims[:free], *[()] * (len(v.shape) - free)]
    for axis in (axis for axes in v.dims[free:] for axis in axes):
        d = next((d for d in range(free) if group.fits(v.shape[d], (*dims[d], axis))), None)
        if d is not None:
            dims[d] = (*dims[d], axis)
    v = group.place(v, tuple(dims))
    # XLA's transform on CPUs fails on any other layout, and a collective's would reach it (jaxlib 0.10 and 0.11).
    row_major = Layout(tuple(range(len(v.shape))))
    (y,) = bind(eqn, [with_layout_constraint(v.x, row_major)])
    return results(eqn, [with_layout_constraint(y, row_major)], v.dims)
