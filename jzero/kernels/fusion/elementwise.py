"""Elementwise functions of a trace.

They take and return float32 arrays [M, N], and rows [1, N] that meet every row of the others: biases. So a kernel may
call them on the tiles of larger arrays, and nothing between what is read and what is written is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero._compat import is_constant
from jzero.kernels.trace import Equation, Read, Variable, elementwise_primitives, program_of, run_equations

PRIMITIVES = elementwise_primitives("t")
LOG2E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A part of a trace as a function of float32 arrays [M, N] and rows [1, N].

    Attributes:
      equations: in order; see `is_elementwise`.
      operands, result: variables of the trace.
    """

    equations: tuple[Equation, ...]
    operands: tuple[Variable, ...]
    result: Variable

    def __call__(self, *xs: jax.Array) -> list[jax.Array]:
        return run_equations(self.equations, dict(zip(self.operands, xs, strict=True)), _in_float32, jnp.float32)(
            [self.result]
        )


@dataclass(frozen=True, eq=False)
class Pullback:
    """The gradients of some operands of a function: `f'(*xs, g)`; those of rows are sums over all rows."""

    f: Elementwise
    operands: tuple[int, ...]

    def __call__(self, *xs: jax.Array) -> list[jax.Array]:
        _, pull = jax.vjp(self.f, *xs[:-1])
        found = pull([xs[-1]])
        return [found[i] for i in self.operands]


def each(xs: Sequence[Any]) -> list[jax.Array]:
    """Return all parts [M, N] of arrays [M, P, N], or of references to them in a kernel, in float32."""
    return [x[:, p].astype(jnp.float32) for x in xs for p in range(x.shape[1])]


def is_elementwise(eqn: Equation, dtype: jnp.dtype) -> bool:
    """Return whether an equation computes each element of its result from those of its operands, or from numbers.

    The result must be of this dtype or float32: a cast to one with less range or precision does more than round.
    """
    if len(eqn.outvars) != 1:
        return False
    (out,) = eqn.outvars
    if eqn.primitive.name == "jit":
        inner = program_of(eqn).jaxpr
        computed = not inner.constvars and not is_constant(inner.outvars[0])
        return computed and all(is_elementwise(one, dtype) for one in inner.eqns)
    if eqn.primitive.name not in PRIMITIVES or out.aval.dtype not in (dtype, jnp.float32):
        return False
    return all(
        v.aval.shape == out.aval.shape or is_row(v.aval, out.aval) or (is_constant(v) and not v.aval.shape)
        for v in eqn.invars
    )


def is_row(x: jax.core.ShapedArray, of: jax.core.ShapedArray) -> bool:
    """Return whether an array [1, ..., N] meets every row of another one [..., N] of its dtype."""
    return of.ndim > 0 and x.shape == (*(1,) * (of.ndim - 1), of.shape[-1]) != of.shape and x.dtype == of.dtype


def _in_float32(eqn: Equation, read: Read[jax.Array]) -> list[jax.Array]:
    """Run an elementwise equation in float32, on arrays of whatever shape."""
    xs = read(eqn.invars)
    if eqn.primitive.name == "jit":
        inner = program_of(eqn).jaxpr
        return run_equations(inner.eqns, dict(zip(inner.invars, xs, strict=True)), _in_float32, jnp.float32)(
            inner.outvars
        )
    # A rounding to the compute dtype between two equations would cost accuracy, and save nothing in registers.
    if eqn.primitive.name in ("convert_element_type", "copy"):
        return xs
    if eqn.primitive.name in ("erf", "erfc"):
        (x,), below = xs, erfc(*xs)
        if eqn.primitive.name == "erfc":
            return [below]
        # The difference has no small values.
        return [jnp.where(jnp.abs(x) < 1e-2, 2 / math.sqrt(math.pi) * x * (1 - x * x / 3), 1 - below)]
    shape = jnp.broadcast_shapes(*map(jnp.shape, xs))
    return [eqn.primitive.bind(*(jnp.broadcast_to(x, shape) for x in xs), **eqn.params)]


# Of a polynomial in u = 1 / (1 + x / 2), fitted to erfc(x) exp(x^2) / u for x >= 0: a relative error of 4.3e-7, and
# of 1e-5 in float32 where exp(-x^2) is smallest.
_ERFC = (
    0.28209467, 0.282119057, 0.246055288, 0.185729657, 0.0277898985, 0.176279769, -0.377157624, 0.220944043,
    -0.0438543247,
)  # fmt: skip


@jax.custom_jvp
def erfc(x: jax.Array) -> jax.Array:
    """Compute the complementary error function in float32.

    Triton has none. In a backward pass this one and its derivative share the exponential, on which XLA's, of two
    polynomials of which each element uses one, spends most of the time of exact GELU.
    """
    half = 1 + 0.5 * jnp.abs(x)
    u = lax.rsqrt(half * half)  # one instruction of a GPU; a division is many
    y, polynomial = jnp.exp2(-LOG2E * x * x) * u, _ERFC[-1] * u + _ERFC[-2]
    for c in reversed(_ERFC[:-2]):
        polynomial = polynomial * u + c
    y = y * polynomial
    return jnp.where(x < 0, 2 - y, y)


@erfc.defjvp
def _erfc_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return erfc(x), -2 / math.sqrt(math.pi) * jnp.exp2(-LOG2E * x * x) * dx
