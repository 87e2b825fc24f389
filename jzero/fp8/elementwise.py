"""Elementwise functions, and casts of their results to fp8, in one pass over memory where there is a kernel.

The functions take and return float32 arrays of one shape. So a kernel may call them on the tiles of larger arrays, and
nothing between what is read and what is written is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compat import function_primitive, inner_jaxprs, is_constant
from jzero.fp8.quantized import cast8

# Of a trace; all are differentiable, and Triton has them.
PRIMITIVES = frozenset(
    {"abs", "add_any", "add", "convert_element_type", "copy", "cos", "div", "erf", "exp", "exp2", "integer_pow", "log"}
    | {"log1p", "logistic", "max", "min", "mul", "neg", "pow", "rsqrt", "sign", "sin", "sqrt", "square", "sub", "tanh"}
)


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A part of a trace as a function of float32 arrays of one shape.

    Attributes:
      equations: in order; see `is_elementwise`.
      operands, result: variables of the trace.
    """

    equations: tuple[Any, ...]
    operands: tuple[Any, ...]
    result: Any

    def __call__(self, *xs: jax.Array) -> list[jax.Array]:
        known = _run(self.equations, dict(zip(self.operands, xs, strict=True)))
        return [known[self.result]]


@dataclass(frozen=True, eq=False)
class Pullback:
    """The gradients of some operands of a function: `f'(*xs, g)`."""

    f: Elementwise
    operands: tuple[int, ...]

    def __call__(self, *xs: jax.Array) -> list[jax.Array]:
        _, pull = jax.vjp(self.f, *xs[:-1])
        found = pull([xs[-1]])
        return [found[i] for i in self.operands]


def identity(*xs: jax.Array) -> list[jax.Array]:
    return list(xs)


def is_elementwise(eqn: Any) -> bool:
    """Return whether an equation computes each element of its result from those of its operands, or from numbers."""
    if eqn.primitive.name == "jit":
        return all(map(is_elementwise, inner_jaxprs(eqn)[0].eqns)) and len(eqn.outvars) == 1
    (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
    if out is None or eqn.primitive.name not in PRIMITIVES or not jnp.issubdtype(out.aval.dtype, jnp.floating):
        return False
    return all(v.aval.shape == out.aval.shape or (is_constant(v) and not v.aval.shape) for v in eqn.invars)


def _run(equations: Sequence[Any], known: dict[Any, Any]) -> dict[Any, Any]:
    """Run elementwise equations in float32, on arrays of whatever shape."""

    def read(v: Any) -> Any:
        return jnp.float32(v.val) if is_constant(v) else known[v]

    for eqn in equations:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            (inner,) = inner_jaxprs(eqn)
            inside = _run(inner.eqns, dict(zip(inner.invars, operands, strict=True)))
            known[eqn.outvars[0]] = inside[inner.outvars[0]]
        elif eqn.primitive.name in ("convert_element_type", "copy"):
            known[eqn.outvars[0]] = operands[0]
        else:
            shape = max((jnp.shape(x) for x in operands), key=len)
            full = [jnp.broadcast_to(x, shape) for x in operands]
            known[eqn.outvars[0]] = eqn.primitive.bind(*full, **eqn.params)
    return known


def amax_of(f: Any, xs: Sequence[jax.Array]) -> jax.Array:
    """Return the largest absolute value of f's results, float32 []."""
    return reduce(jnp.maximum, [jnp.max(jnp.abs(y)) for y in _whole(f, xs)])


def cast_pair(f: Any, xs: Sequence[jax.Array], scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round `f(*xs) * scale` to an fp8 dtype; return it and its transpose.

    Args:
      f: takes one array for each part of each operand, and returns Q.
      xs: [M, P, N], each of P parts.
      scale: float32 [].

    Returns:
      [M, Q N] and [Q N, M].
    """
    jaxpr = jax.make_jaxpr(partial(_plain, f, dtype))(*xs, scale)
    return tuple(_primitive.bind(*xs, scale, jaxpr=jaxpr, f=f))  # type: ignore[return-value]


def _whole(f: Any, xs: Sequence[jax.Array]) -> list[jax.Array]:
    return f(*(x[:, p].astype(jnp.float32) for x in xs for p in range(x.shape[1])))


def _plain(f: Any, dtype: Any, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    *xs, scale = operands
    x8 = jnp.concatenate([cast8(y, scale, dtype) for y in _whole(f, xs)], axis=1)
    return x8, x8.T


def _kernel(operands: Any, results: Any, device: Any, f: Any) -> Any:
    """Choose a kernel for an NVIDIA GPU; None: XLA's program."""
    from jzero.fp8 import triton

    *xs, _ = operands
    if device.platform != "gpu" or not triton.supports([x.shape for x in xs], results[0].shape):
        return None
    return partial(triton.cast_pair, f, dtype=results[0].dtype)


_primitive = function_primitive("fp8_cast_pair", _kernel)
