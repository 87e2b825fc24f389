"""Chains of fp8 products in a program that runs on Values; see `jzero.fusion.chains`."""

from __future__ import annotations

from typing import Any

from jzero.fp8 import product
from jzero.fp8.quantized import Quantized
from jzero.fusion.chains import chains
from jzero.fusion.form import form_of
from jzero.spread.rules import results
from jzero.spread.value import Group, Value, undivided


class Chained:
    """The chains of a program.

    A group of several devices runs the equations one by one: its shards may lie otherwise in each product.
    """

    def __init__(self, group: Group, jaxpr: Any, known: dict[Any, Value]):
        self._known, self._links = known, dict[Any, product.Link]()
        some = group.size == 1 and any(isinstance(v.x, Quantized) for v in known.values())
        self._chains = chains(jaxpr, self._in_fp8) if some else {}
        found = self._chains.values()
        self._sources = {v for chain in found for v, _ in chain.sources}
        self.skipped = frozenset[int]().union(*(chain.skipped for chain in found))

    def _in_fp8(self, v: Any) -> bool:
        return v in self._known and isinstance(self._known[v].x, Quantized)

    def takes(self, eqn: Any) -> bool:
        """Return whether an equation is one of a chain's products."""
        return id(eqn) in self._chains or eqn.outvars[0] in self._sources

    def run(self, eqn: Any) -> list[Value]:
        """Run the first or the last product of a chain."""
        chain, out = self._chains.get(id(eqn)), eqn.outvars[0]
        w, dtype = self._known[eqn.invars[1]].x, out.aval.dtype
        if chain and out not in self._sources:
            xs = chain.parts([self._known[v].x for v, _ in chain.sources])
            y = product.mapped_dot_general(chain.f, xs, [self._links[v] for v, _ in chain.sources], w, dtype)
        else:
            x = self._known[eqn.invars[0]]
            form = form_of(eqn.params["dimension_numbers"], (len(x.shape), len(w.shape)), 1)
            assert form is not None  # noqa: S101  # `chains` asks for one
            y, self._links[out] = product.linked_dot_general(x.x, w, form, dtype, x.casts)
        return results(eqn, [y.reshape(out.aval.shape)], undivided(out.aval.ndim))
