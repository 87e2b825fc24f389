"""Runs a function with kernels in the place of what its trace contains: chains of products, cross-entropies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp

from jzero._compat import is_constant
from jzero.kernels.fusion.chains import Chains, weight_of
from jzero.kernels.fusion.cross_entropies import cross_entropies
from jzero.kernels.fusion.elementwise import is_row
from jzero.kernels.fusion.parts import FROZEN, cut_with_rows, mapped_dot_general, split_parts
from jzero.kernels.trace import Equation, Read, Variable
from jzero.tracing.equations import Equations, run_equation
from jzero.tracing.source_lines import source_of
from jzero.tree import PyTree


def fused(f: Callable, *, chains: bool = True, losses: bool = False, keep: bool = False) -> Callable:
    """Make the function that runs the chains of products and the cross-entropies in f's trace as kernels.

    Forward mode (`jax.jvp`) does not pass through it.

    Args:
      chains: whether to replace chains, see `kernels.fusion.parts`.
      losses: whether to replace cross-entropies, see `kernels.softmax`.
      keep: whether the backward pass keeps the results of elementwise functions of one array, GELU's for one.
    """

    def run(*args: PyTree) -> PyTree:
        others: list[PyTree] = []  # results that are no arrays have a better error where they are used
        tree: PyTree = None

        def arrays(*args: PyTree) -> list[jax.Array]:
            nonlocal others, tree
            leaves, tree = jax.tree.flatten(f(*args))
            others = [None if _is_array(x) else x for x in leaves]
            return [x for x, other in zip(leaves, others, strict=True) if other is None]

        closed = jax.make_jaxpr(arrays)(*args)
        program, matrices = Equations(closed), _Matrices(Chains(closed.jaxpr), keep) if chains else None
        ends = cross_entropies(closed.jaxpr) if losses else {}

        def bind(eqn: Equation, read: Read[jax.Array]) -> Sequence[jax.Array]:
            if loss := ends.get(id(eqn)):
                with source_of(eqn), eqn.ctx.manager:
                    return [loss(*read([loss.logits, loss.labels]))]
            if matrices is None or not matrices.takes(eqn):
                return run_equation(eqn, read)
            with source_of(eqn), eqn.ctx.manager:
                return matrices.run(eqn, read)

        kept = [eqn for eqn in program.eqns if matrices is None or id(eqn) not in matrices.skipped]
        found = iter(program.run(kept, program.inputs, jax.tree.leaves(args), bind)(program.outputs))
        return jax.tree.unflatten(tree, [next(found) if x is None else x for x in others])

    return run


def _is_array(x: object) -> bool:
    """Return whether a function that JAX transforms may return x."""
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


class _Matrices:
    """Runs chains, products, and the sums that products are terms of, on matrices [M, N].

    A residual is added to a product of matrices in the end. XLA lets cuBLAS add it, but copies it before if the two
    have another shape than their sum: it takes the reshaped residual for an array of its own, to be overwritten.
    """

    def __init__(self, chains: Chains, keep: bool):
        self._chains, self._keep, self._known = chains, keep, dict[Variable, jax.Array]()
        self._sums: set[Variable] = set()
        self.skipped = chains.skipped

    def takes(self, eqn: Equation) -> bool:
        """Return whether an equation is a product, or a sum with one, or cuts it into parts."""
        known = id(eqn) in self._chains.biased_cuts or any(v in self._known for v in eqn.outvars)
        return known or _cuts(eqn) or self._chains.multiplies(eqn) or self._columns(eqn) > 0

    def _columns(self, eqn: Equation) -> int:
        """Return the width of the matrices that a sum with a product has as terms; 0: it is no such sum."""
        terms = [v for v in eqn.invars if not is_constant(v) and v in self._sums]
        if eqn.primitive.name != "add" or not terms:
            return 0
        out, columns = eqn.outvars[0].aval, self._known[terms[0]].shape[1]
        rows = columns == out.shape[-1]
        fit = all(
            not is_constant(v) and (v.aval.shape == out.shape or (rows and is_row(v.aval, out))) for v in eqn.invars
        )
        return columns if fit else 0

    def run(self, eqn: Equation, read: Read[jax.Array]) -> list[jax.Array]:
        """Run an equation that `takes` takes."""
        if biased := self._chains.biased_cuts.get(id(eqn)):
            rows = jnp.stack([row.reshape(-1) for row in read(biased.rows)]).reshape(len(eqn.outvars), -1)
            parts = cut_with_rows(self._matrix(biased.source, rows.size, read), rows)
            self._known.update(zip(biased.results, parts, strict=True))
            return [part.reshape(v.aval.shape) for part, v in zip(parts, eqn.outvars, strict=True)]
        if _cuts(eqn):
            return split_parts(*read(eqn.invars), **eqn.params)
        if eqn.outvars[0] not in self._known or eqn.primitive.name != "add":
            self._compute(eqn, read)
        return [self._known[v].reshape(v.aval.shape) for v in eqn.outvars]

    def _compute(self, eqn: Equation, read: Read[jax.Array]) -> None:
        (out,), known = eqn.outvars, self._known
        if chain := self._chains.of.get(id(eqn)):
            if out not in known:
                xs, weights = read(v for v, _ in chain.sources), [weight_of(one, read) for one in chain.products]
                # GELU, of one array, is kept: to write it again is a quarter of its backward kernel's traffic. Of
                # SwiGLU it is a sixth, and more memory.
                keep = self._keep and chain.operands == 1
                ys = mapped_dot_general(chain.f, chain.parts(xs), weights, eqn.params.get("precision"), keep)
                known.update(zip((one.outvars[0] for one in chain.products), ys, strict=True))
        elif eqn.primitive.name == "dot_general":
            (w,) = read(eqn.invars[1:])
            x, flat = self._matrix(eqn.invars[0], len(w), read), w.reshape(len(w), -1)
            known[out] = jax.lax.dot(x, flat, precision=eqn.params["precision"])
        elif eqn.primitive.name == FROZEN:
            known[out] = run_equation(eqn, read)[0].reshape(prod(eqn.invars[0].aval.shape[:-1]), -1)
        else:
            known[out] = jnp.add(*(self._matrix(v, self._columns(eqn), read) for v in eqn.invars))
        self._sums.add(out)

    def _matrix(self, v: Variable, columns: int, read: Read[jax.Array]) -> jax.Array:
        """Return the value of a variable as a matrix, the same for all that read it."""
        if v not in self._known or self._known[v].shape[1] != columns:
            (x,) = read([v])
            self._known[v] = x.reshape(-1, columns)
        return self._known[v]


def _cuts(eqn: Equation) -> bool:
    """Return whether an equation cuts numbers with gradients into three or more parts: queries, keys and values.

    Of two parts, a gate for one, the gradients are often computed together: one kernel reads what both need.
    """
    several = eqn.primitive.name == "split" and len(eqn.outvars) > 2
    return several and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact)
