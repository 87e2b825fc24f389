"""The table of rules: what each primitive does with arrays that are divided or partial; and elementwise primitives.

A rule is `rule(group, eqn, values) -> values`. It runs the equation's primitive on what this device holds, after it has
moved what is needed, and says how the results lie. A primitive without one computes on whole arrays, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.spread.value import Dims, Group, Value, undivided

Rule = Callable[[Group, Any, list[Value]], list[Value]]
RULES: dict[str, Rule] = {}
# Scopes of primitives that run on whole arrays although their operands were divided; the second in a backward pass of
# the model's own.
WHOLE_ARRAYS, WHOLE_BACKWARD = "whole_arrays", "whole_arrays_backward"

ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex"
    " conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag"
    " integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or population_count"
    " pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign"
    " sin sinh sqrt square stop_gradient sub tan tanh xor"
)
LINEAR = ("add", "sub", "add_any", "neg", "name")  # of several partial arrays


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of primitives."""

    def register(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


def bind(eqn: Any, xs: Sequence[Any], **changed: Any) -> list[Any]:
    """Run the primitive of an equation on other arrays, with some of its parameters changed."""
    out = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params({**eqn.params, **changed}))
    return list(out) if eqn.primitive.multiple_results else [out]


def results(
    eqn: Any, xs: Sequence[Any], dims: Dims, partial: tuple[str, ...] = (), weight: bool = False
) -> list[Value]:
    """Make the results of an equation, which all lie alike."""
    return [Value(x, v.aval.shape, dims, partial, weight) for x, v in zip(xs, eqn.outvars, strict=True)]


def everywhere(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Run a primitive on whole arrays, the same on every device."""
    gathered = [group.undivided(v).x for v in values]
    if all(v.whole for v in values):
        xs = bind(eqn, gathered)
    else:
        group.ledger.fall_back()
        with jax.named_scope(WHOLE_BACKWARD if group.backward else WHOLE_ARRAYS):
            xs = bind(eqn, gathered)
    return [Value(x, v.aval.shape, undivided(len(v.aval.shape))) for x, v in zip(xs, eqn.outvars, strict=True)]


@rule(*ELEMENTWISE.split())
def elementwise(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    shape, first = eqn.outvars[0].aval.shape, values[0]
    if _keeps_sum(eqn, values):
        return results(eqn, bind(eqn, [v.x for v in values]), first.dims, first.partial)
    # What is divided already says where a sum is scattered to: a residual stream, to which a product is added.
    settled = common([v for v in values if not v.partial], len(shape))
    values = [group.summed(v, settled) for v in values]
    dims = common(values, len(shape))
    xs = [group.place(v, _onto(v, shape, dims)).x for v in values]
    weight = any(v.weight for v in values) and all(v.weight or not v.shape for v in values)
    return results(eqn, bind(eqn, xs), dims, weight=weight)


def _keeps_sum(eqn: Any, values: list[Value]) -> bool:
    """Return whether the primitive of the parts is a part of the result."""
    first, name = values[0], eqn.primitive.name
    if not first.partial:
        return False
    if name in LINEAR and all((v.partial, v.dims, v.shape) == (first.partial, first.dims, first.shape) for v in values):
        return True
    # A quotient of integers is rounded, and the sum of rounded parts is another number.
    scales = name == "mul" or (name == "div" and jnp.issubdtype(first.x.dtype, jnp.inexact))
    return scales and not values[1].shape and values[1].whole


def common(values: Sequence[Value], ndim: int) -> Dims:
    """Choose how arrays of one shape lie together: like the most divided one; others add what it leaves open."""
    dims: list[tuple[str, ...]] = [()] * ndim
    full = [v for v in values if len(v.shape) == ndim]
    for v in sorted(full, key=lambda v: (v.weight, -len(v.axes))):
        for d, axes in enumerate(v.dims):
            if not dims[d] and not {axis for taken in dims for axis in taken} & set(axes):
                dims[d] = axes
    return tuple(dims)


def _onto(v: Value, shape: Sequence[int], dims: Dims) -> Dims:
    """Divide an operand like the result; not where it is broadcast, and not a number beside arrays."""
    if len(v.shape) != len(shape):
        return undivided(len(v.shape))
    return tuple(() if n == 1 != size else axes for n, size, axes in zip(v.shape, shape, dims, strict=True))


@rule("reshard")
def reshard(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """JAX puts it before updates of arrays; without explicit shardings it does nothing."""
    return values


@rule("optimization_barrier")
def barrier(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    xs = bind(eqn, [v.x for v in values])
    return [Value(x, v.shape, v.dims, v.partial, v.weight) for x, v in zip(xs, values, strict=True)]
