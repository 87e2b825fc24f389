"""Slices of a traced function: run the part of a jaxpr that some of its outputs need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jzero._compat import closed_jaxpr, is_constant
from jzero.tracing.source_lines import source_of
from jzero.tree import named

_CALLS = ("jit", "closed_call", "remat2")  # the primitives that `inlined` inlines


class Equations:
    """The equations of a closed jaxpr; any subset of them can run."""

    def __init__(self, closed: Any):
        self.eqns, self.inputs, self.outputs = closed.jaxpr.eqns, list(closed.jaxpr.invars), list(closed.jaxpr.outvars)
        self.constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def reached_from(self, variables: Iterable[Any]) -> set[Any]:
        """Collect all variables that depend on the given ones."""
        reached = set(variables)
        for eqn in self.eqns:
            if any(not is_constant(v) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        return reached

    def needed(self, wanted: Iterable[Any], given: Iterable[Any]) -> list[Any]:
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
        self, eqns: Iterable[Any], variables: Sequence[Any], values: Sequence[Any], bind: Callable | None = None
    ) -> Callable:
        """Run these equations and return a function that reads variables from the result.

        Args:
          bind: `bind(eqn, read)` runs one; `read` gives the values of a list of variables.
        """
        bind = bind or run_equation
        known = self.constants | dict(zip(variables, values, strict=True))

        def read(variables: Iterable[Any]) -> list[Any]:
            return [v.val if is_constant(v) else known[v] for v in variables]

        for eqn in eqns:
            known |= zip(eqn.outvars, bind(eqn, read), strict=True)
        return read


def touched(f: Callable, state: Any, *rest: Any) -> tuple[set[str], set[str]]:
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


def inlined(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Run a jaxpr with its calls (jit, checkpoint) inlined: a new trace then contains their equations one by one."""
    program = Equations(closed)

    def bind(eqn: Any, read: Callable) -> Sequence[Any]:
        if eqn.primitive.name not in _CALLS:
            return run_equation(eqn, read)
        with source_of(eqn):
            return inlined(closed_jaxpr(eqn.params["jaxpr"]), read(eqn.invars))

    return program.run(program.eqns, program.inputs, values, bind)(program.outputs)


def run_equation(eqn: Any, read: Callable) -> Sequence[Any]:
    """Run an equation on the values that `read` gives for its operands."""
    with source_of(eqn), eqn.ctx.manager:
        out = eqn.primitive.bind(*read(eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]
