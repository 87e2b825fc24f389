"""Elementwise functions of a trace.

They take and return float32 arrays of one shape. So a kernel may call them on the tiles of larger arrays, and nothing
between what is read and what is written is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compat import inner_jaxprs, is_constant

# Of a trace; all are differentiable, and Triton has them.
PRIMITIVES = frozenset(
    {"abs", "add_any", "add", "convert_element_type", "copy", "cos", "div", "exp", "exp2", "integer_pow", "log"}
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


def each(xs: Sequence[Any]) -> list[jax.Array]:
    """Return all parts [M, N] of arrays [M, P, N], or of references to them in a kernel, in float32."""
    return [x[:, p].astype(jnp.float32) for x in xs for p in range(x.shape[1])]


def is_elementwise(eqn: Any, dtype: Any) -> bool:
    """Return whether an equation computes each element of its result from those of its operands, or from numbers.

    The result must be of this dtype or float32: a cast to one with less range or precision does more than round.
    """
    (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
    if eqn.primitive.name == "jit" and out is not None:
        (inner,) = inner_jaxprs(eqn)
        computed = not inner.constvars and not is_constant(inner.outvars[0])
        return computed and all(is_elementwise(one, dtype) for one in inner.eqns)
    if out is None or eqn.primitive.name not in PRIMITIVES or out.aval.dtype not in (dtype, jnp.float32):
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
