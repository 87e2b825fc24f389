"""Runs a function with kernels in the place of what its trace contains: chains of products, cross-entropies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jzero.kernels.fusion.chains import Chains
from jzero.kernels.fusion.cross_entropies import cross_entropies
from jzero.kernels.fusion.parts import mapped_dot_general
from jzero.kernels.trace import Equation, Read
from jzero.tracing.equations import Equations, run_equation
from jzero.tracing.source_lines import source_of
from jzero.tree import PyTree


def fused(f: Callable, *, chains: bool = True, losses: bool = False) -> Callable:
    """Make the function that runs each chain of products in f's trace as one, see `kernels.fusion.parts`.

    Args:
      chains: whether it does that.
      losses: whether it runs cross-entropies by `kernels.softmax`.
    """

    def run(*args: PyTree) -> PyTree:
        try:
            closed, result = jax.make_jaxpr(f, return_shape=True)(*args)
        except TypeError:
            return f(*args)  # a result that is no array has a better error where it is used
        program, found = Equations(closed), Chains(closed.jaxpr, lambda _: chains)
        ends = cross_entropies(closed.jaxpr) if losses else {}

        def bind(eqn: Equation, read: Read[jax.Array]) -> Sequence[jax.Array]:
            if loss := ends.get(id(eqn)):
                with source_of(eqn), eqn.ctx.manager:
                    return [loss(*read([loss.logits, loss.labels]))]
            if not (chain := found.of.get(id(eqn))):
                return run_equation(eqn, read)
            *values, weight = read([*(v for v, _ in chain.sources), chain.weight])
            with source_of(eqn), eqn.ctx.manager:
                y = mapped_dot_general(chain.f, chain.parts(values), weight, eqn.params["precision"])
            return [y.reshape(eqn.outvars[0].aval.shape)]

        kept = [eqn for eqn in program.eqns if id(eqn) not in found.skipped]
        outputs = program.run(kept, program.inputs, jax.tree.leaves(args), bind)(program.outputs)
        return jax.tree.unflatten(jax.tree.structure(result), outputs)

    return run
