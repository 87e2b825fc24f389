"""The equations of a trace (a jaxpr), and groups of JAX's primitives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax

from jzero._compat import closed_jaxpr, is_constant

T = TypeVar("T")
Read = Callable[[Iterable["Variable"]], list[T]]  # the values of variables, of whatever kind


class Variable(Protocol):
    """A variable of a trace; or a number written in it, see `is_constant`."""

    aval: jax.core.ShapedArray
    val: Any  # of a number


class Equation(Protocol):
    """An equation of a trace: outvars = primitive(*invars, **params)."""

    primitive: Any
    params: dict[str, Any]
    invars: Sequence[Variable]
    outvars: Sequence[Variable]
    source_info: Any
    ctx: Any


class Jaxpr(Protocol):
    """A trace without the values of its constants."""

    eqns: Sequence[Equation]
    constvars: Sequence[Variable]
    invars: Sequence[Variable]
    outvars: Sequence[Variable]


class ClosedJaxpr(Protocol):
    """A trace with the values of its constants."""

    jaxpr: Jaxpr
    consts: Sequence[Any]


# Equations that run one program on their operands, once.
CALLS = ("jit", "closed_call", "core_call", "remat2", "checkpoint")


# Attention as one kernel, which reads and writes arrays of its own: XLA cuts no part of an array for it on the way.
ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd", "flash_mha_fwd_hlo")


def program_of(eqn: Equation) -> ClosedJaxpr:
    """Return the program that a call, a scan or a function with derivatives of its own runs."""
    return closed_jaxpr(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


def users_of(jaxpr: Jaxpr) -> dict[Variable, dict[int, Equation | None]]:
    """Return the equations that read each variable, by identity; None stands for the program's results."""
    users: dict[Variable, dict[int, Equation | None]] = {}
    for eqn, variables in [*((eqn, eqn.invars) for eqn in jaxpr.eqns), (None, jaxpr.outvars)]:
        for v in variables:
            if not is_constant(v):
                users.setdefault(v, {})[id(eqn)] = eqn
    return users


def run_equations(
    eqns: Iterable[Equation],
    known: dict[Variable, T],
    step: Callable[[Equation, Read[T]], Iterable[T]],
    number: Callable[[Any], T] = lambda value: value,
) -> Read[T]:
    """Run equations one after another, on values of any kind: arrays, shards, or what is known of an array.

    Args:
      known: the values of variables, to which those of the equations' results are added.
      step: `step(eqn, read)` returns the values of an equation's results; `read` gives those of its operands.
      number: makes a value of a number that is written in the trace.

    Returns:
      `read`.
    """

    def read(variables: Iterable[Variable]) -> list[T]:
        return [number(v.val) if is_constant(v) else known[v] for v in variables]

    for eqn in eqns:
        known |= zip(eqn.outvars, step(eqn, read), strict=True)
    return read


# JAX's elementwise primitives, by two facts: t: kernels have it, and it is differentiable; c: XLA computes it where its
# result is read, so that it may run again.
_ELEMENTWISE = {
    "tc": "abs add add_any convert_element_type copy div erf erfc exp exp2 integer_pow log log1p log2 logistic max min"
    " mul neg one_minus_square rsqrt sign sqrt square sub tanh",
    "t": "cos pow sin",
    "c": "and clamp eq expm1 floor ge gt is_finite le lt ne not or rem round select_n stop_gradient xor",
    "": "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz complex conj copy_p cosh digamma"
    " erf_inv igamma igamma_grad_a igammac imag lgamma name nextafter polygamma population_count real reduce_precision"
    " shift_left shift_right_arithmetic shift_right_logical sinh tan zeta",
}


def elementwise_primitives(fact: str = "") -> frozenset[str]:
    """Return the names of the elementwise primitives that have this property in the table; all by default."""
    return frozenset(name for facts, names in _ELEMENTWISE.items() if fact in facts for name in names.split())
