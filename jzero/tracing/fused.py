"""A function with the elementwise functions between its products fused; see `jzero.fusion`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jzero.fusion.chains import chains
from jzero.fusion.product import mapped_dot_general
from jzero.tracing.equations import Equations, run_equation
from jzero.tracing.source_lines import source_of


def fused(f: Callable) -> Callable:
    """Make the function that runs each chain of products in f's trace as one, see `fusion.product`."""

    def run(*args: Any) -> Any:
        closed, result = jax.make_jaxpr(f, return_shape=True)(*args)
        program, found = Equations(closed), chains(closed.jaxpr)

        def bind(eqn: Any, read: Callable) -> Sequence[Any]:
            if not (chain := found.get(id(eqn))):
                return run_equation(eqn, read)
            *values, weight = read([*(v for v, _ in chain.sources), chain.weight])
            with source_of(eqn), eqn.ctx.manager:
                y = mapped_dot_general(chain.f, chain.parts(values), weight, eqn.params["precision"])
            return [y.reshape(eqn.outvars[0].aval.shape)]

        skipped = frozenset[int]().union(*(chain.skipped for chain in found.values()))
        kept = [eqn for eqn in program.eqns if id(eqn) not in skipped]
        outputs = program.run(kept, program.inputs, jax.tree.leaves(args), bind)(program.outputs)
        return jax.tree.unflatten(jax.tree.structure(result), outputs)

    return run
