"""Runs a function with kernels in the place of what its trace contains: chains of products, cross-entropies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from jzero.kernels.fusion.chains import Chains
from jzero.kernels.fusion.cross_entropies import CrossEntropy, cross_entropies
from jzero.kernels.fusion.parts import mapped_dot_general
from jzero.kernels.trace import ClosedJaxpr, Equation, Read, program_of
from jzero.tracing.equations import Equations, run_equation
from jzero.tracing.source_lines import source_of
from jzero.tree import PyTree


def fused(f: Callable) -> Callable:
    """Make the function that runs each chain of products in f's trace as one, see `kernels.fusion.parts`."""

    def run(*args: PyTree) -> PyTree:
        closed, result = jax.make_jaxpr(f, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(result), _run(closed, jax.tree.leaves(args), Chains(closed.jaxpr)))

    return run


def fused_loss(f: Callable, chains: bool) -> Callable:
    """Make the function with kernels for the cross-entropies of f, see `kernels.softmax`; and for chains, if asked."""

    def run(*args: PyTree) -> PyTree:
        try:
            closed, result = jax.make_jaxpr(f, return_shape=True)(*args)
        except TypeError:
            return f(*args)  # what is no array has a better error where it is used
        found = Chains(closed.jaxpr, lambda _: chains)
        leaves = _run(closed, jax.tree.leaves(args), found, cross_entropies(closed.jaxpr))
        return jax.tree.unflatten(jax.tree.structure(result), leaves)

    return run


def _run(
    closed: ClosedJaxpr, values: Sequence[jax.Array], chains: Chains, losses: Mapping[int, CrossEntropy] | None = None
) -> list[jax.Array]:
    """Run a program with its chains and losses by kernels."""
    program, losses = Equations(closed), losses or {}

    def bind(eqn: Equation, read: Read[jax.Array]) -> Sequence[jax.Array]:
        if loss := losses.get(id(eqn)):
            with source_of(eqn), eqn.ctx.manager:
                return [loss(*read([loss.logits, loss.labels]))]
        if not (chain := chains.of.get(id(eqn))):
            return run_equation(eqn, read)
        *operands, weight = read([*(v for v, _ in chain.sources), chain.weight])
        with source_of(eqn), eqn.ctx.manager:
            y = mapped_dot_general(chain.f, chain.parts(operands), weight, eqn.params["precision"])
        return [y.reshape(eqn.outvars[0].aval.shape)]

    kept = [eqn for eqn in program.eqns if id(eqn) not in chains.skipped]
    return program.run(kept, program.inputs, values, bind)(program.outputs)
