"""Walks through the operations of a trace, and slices of it: the part that some of its outputs need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jzero._compat import inner_jaxprs, is_constant
from jzero.kernels.trace import CALLS, ClosedJaxpr, Equation, Jaxpr, Read, Variable, program_of, run_equations
from jzero.tracing.source_lines import source_function, source_of
from jzero.tree import PyTree, named

UNREAD = ("pallas_call", "ffi_call", "triton_kernel_call", "custom_call")  # kernels, whose work no trace shows


@dataclass(frozen=True, eq=False)
class TracedOperation:
    """One operation of a traced program.

    Attributes:
      times: how often it runs; a loop of unknown length counts as one pass.
      share: of these times, by the branches of the conditions around it, which are taken equally often.
      scope: the names around it, outermost first, as "/transpose(jvp(stack))/attention".
      outer: the operation that calls it.
    """

    eqn: Equation
    times: int = 1
    share: float = 1.0
    scope: str = ""
    outer: TracedOperation | None = None

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def line(self) -> str:
        """The line of the model; an operation without one takes its caller's."""
        return source_function(self.eqn) or (self.outer.line if self.outer else "an unknown line")


def operations(
    jaxpr: Jaxpr, times: int = 1, share: float = 1.0, outer: TracedOperation | None = None
) -> Iterator[TracedOperation]:
    """Yield the operations of a program and of what they run; kernels, which no trace shows, are not entered."""
    for eqn in jaxpr.eqns:
        scope = f"{outer.scope if outer else ''}/{eqn.source_info.name_stack}"
        yield (operation := TracedOperation(eqn, times, share, scope, outer))
        bodies = () if operation.name in UNREAD else inner_jaxprs(eqn)
        passes = times * eqn.params["length"] if operation.name == "scan" else times
        for body in bodies:
            own = share / len(bodies) if operation.name == "cond" else share
            yield from operations(body, passes, own, operation)


class Equations:
    """The equations of a closed jaxpr; any subset of them can run."""

    def __init__(self, closed: ClosedJaxpr):
        self.eqns, self.inputs, self.outputs = closed.jaxpr.eqns, list(closed.jaxpr.invars), list(closed.jaxpr.outvars)
        self.constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def reached_from(self, variables: Iterable[Variable]) -> set[Variable]:
        """Collect all variables that depend on the given ones."""
        reached = set(variables)
        for eqn in self.eqns:
            if any(not is_constant(v) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        return reached

    def needed(self, wanted: Iterable[Variable], given: Iterable[Variable]) -> list[Equation]:
        """List the equations that compute the wanted variables from the given ones, in order.

        An effect (a print, a callback) does not make an equation needed.
        """
        wanted, given, eqns = {v for v in wanted if not is_constant(v)}, set(given), []
        for eqn in reversed(self.eqns):
            if any(v in wanted and v not in given for v in eqn.outvars):
                eqns.append(eqn)
                wanted.update(v for v in eqn.invars if not is_constant(v))
        return eqns[::-1]

    def run(
        self, eqns: Iterable[Equation], variables: Sequence[Variable], values: Sequence[Any],
        bind: Callable[[Equation, Read[Any]], Sequence[Any]] | None = None,
    ) -> Read[Any]:  # fmt: skip
        """Run these equations, each by `bind(eqn, read)`; return a function that reads variables from the result."""
        return run_equations(eqns, self.constants | dict(zip(variables, values, strict=True)), bind or run_equation)


def touched(f: Callable, state: PyTree, *rest: PyTree) -> tuple[set[str], set[str]]:
    """Return the names of the leaves that `f(state, *rest) -> (result, new state)` replaces and reads, by its trace.

    A leaf that only passes through is not among them.
    """
    closed, (result, new) = jax.make_jaxpr(f, return_shape=True)(state, *rest)
    traced = Equations(jax.make_jaxpr(lambda *values: inlined(closed, values))(*closed.in_avals))
    origin = dict(zip(traced.inputs, named(state), strict=False))  # variable -> the leaf whose value it has
    for eqn in traced.eqns:
        if eqn.primitive.name == "stop_gradient" and eqn.invars[0] in origin:
            origin[eqn.outvars[0]] = origin[eqn.invars[0]]
    results, news = traced.outputs[: len(named(result))], traced.outputs[len(named(result)) :]
    replaced = {n: v for n, v in zip(named(new), news, strict=True) if is_constant(v) or origin.get(v) != n}
    wanted = [*results, *replaced.values()]
    used = [v for eqn in traced.needed(wanted, traced.inputs) for v in eqn.invars] + wanted
    return set(replaced), {origin[v] for v in used if not is_constant(v) and v in origin}


def inlined(closed: ClosedJaxpr, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a jaxpr with its calls (jit, checkpoint) inlined: a new trace then contains their equations one by one."""
    program = Equations(closed)

    def bind(eqn: Equation, read: Read[jax.Array]) -> Sequence[jax.Array]:
        if eqn.primitive.name not in CALLS:
            return run_equation(eqn, read)
        with source_of(eqn):
            return inlined(program_of(eqn), read(eqn.invars))

    return program.run(program.eqns, program.inputs, values, bind)(program.outputs)


def run_equation(eqn: Equation, read: Read[Any]) -> Sequence[Any]:
    """Run an equation on the values that `read` gives for its operands."""
    with source_of(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*read(eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]
