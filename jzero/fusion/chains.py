"""Finds products whose result goes through an elementwise function into another product, and nowhere else: SwiGLU.

The function is then one kernel in the forward pass, and one in the backward pass (`jzero.fusion.product`). In fp8
nothing between the products is written in the compute dtype (`jzero.fp8.product`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jzero._compat import is_constant
from jzero.fusion.elementwise import Elementwise, is_elementwise
from jzero.fusion.form import form_of


@dataclass(frozen=True, eq=False)
class Chain:
    """An equation `f(parts of the sources) w`.

    Attributes:
      f: of the parts, in the order of the sources.
      sources: results of products, and the shape [P, N] of the parts of a row of each.
      weight: the variable of w.
      skipped: the equations, by identity, that are a part of it.
    """

    f: Elementwise
    sources: tuple[tuple[Any, tuple[int, int]], ...]
    weight: Any
    skipped: frozenset[int]

    def parts(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the values of the sources, each as [M, P, N]."""
        return [x.reshape(-1, *shape) for x, (_, shape) in zip(values, self.sources, strict=True)]


def chains(jaxpr: Any, fits: Callable[[Any], bool] = lambda weight: True) -> dict[int, Chain]:
    """Find the chains of a program: equation of the last product, by identity -> the chain.

    Args:
      fits: tells whether the product with a variable may be the first or the last of a chain.
    """
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    users: dict[Any, list[int]] = {}
    for eqn in jaxpr.eqns:
        for v in {v for v in eqn.invars if not is_constant(v)}:
            users.setdefault(v, []).append(id(eqn))
    for v in (v for v in jaxpr.outvars if not is_constant(v)):
        users.setdefault(v, []).append(0)
    found: dict[int, Chain] = {}
    for eqn in jaxpr.eqns:
        if _multiplies(eqn, fits) and (chain := _chain(eqn, made, users, fits)):
            found[id(eqn)] = chain
    return found


def _multiplies(eqn: Any, fits: Callable[[Any], bool]) -> bool:
    """Return whether it is x [..., K] w [K, ...], all of one dtype of two bytes, with a w that fits."""
    if eqn.primitive.name != "dot_general" or is_constant(eqn.invars[1]) or not fits(eqn.invars[1]):
        return False
    x, w, y = (v.aval for v in (*eqn.invars, *eqn.outvars))
    form = form_of(eqn.params["dimension_numbers"], (x.ndim, w.ndim), 1)
    alike = x.dtype == w.dtype == y.dtype and x.dtype.itemsize == 2
    return alike and y.size > 0 and form is not None and form.leading and form.contracted == (x.ndim - 1,)


def _chain(last: Any, made: dict[Any, Any], users: dict[Any, list[int]], fits: Any) -> Chain | None:
    equations: list[Any] = []
    views: list[Any] = []
    parts: dict[Any, tuple[Any, int, int]] = {}  # variable -> source, index, count
    ndim, dtype = last.invars[0].aval.ndim, last.outvars[0].aval.dtype

    def visit(v: Any) -> bool:
        eqn = made.get(v)
        if v in parts or any(eqn is other for other in equations):
            return True
        if eqn is None:
            return False
        if part := _part(v, made, ndim, views):
            parts[v] = part
            return part[0].aval.dtype == dtype and _multiplies(made[part[0]], fits)
        if not is_elementwise(eqn, dtype) or not all(visit(x) for x in eqn.invars if not is_constant(x)):
            return False
        equations.append(eqn)
        return True

    if not visit(last.invars[0]) or not equations:
        return None
    counts = {source: count for source, _, count in parts.values()}
    order = [(source, p) for source, count in counts.items() for p in range(count)]
    by_part = {(source, p): v for v, (source, p, _) in parts.items()}
    inside = {id(eqn) for eqn in (*equations, *views)}
    own = [*counts, *parts, *(v for eqn in (*equations, *views) for v in eqn.outvars)]
    if len(by_part) < len(parts) or any((at not in by_part) for at in order):
        return None
    if last.invars[1] in own or any(not set(users.get(v, ())) <= inside | {id(last)} for v in own):
        return None
    f = Elementwise(tuple(equations), tuple(by_part[at] for at in order), last.invars[0])
    size = last.invars[0].aval.shape[-1]
    return Chain(f, tuple((v, (n, size)) for v, n in counts.items()), last.invars[1], frozenset(inside))


def _part(v: Any, made: dict[Any, Any], ndim: int, views: list[Any]) -> tuple[Any, int, int] | None:
    """Return (result of a product, index, count) if v is it, or one of its equal parts; add what cuts it to `views`."""
    path, eqn = [], made[v]
    at = v
    if eqn.primitive.name == "squeeze":
        path.append(eqn)
        at = eqn.invars[0]
        eqn = made.get(at)
    if eqn is None:
        return None
    if eqn.primitive.name == "dot_general" and not path and v.aval.ndim == ndim:
        return v, 0, 1
    if eqn.primitive.name != "split" or len({v.aval.shape for v in eqn.outvars}) > 1:
        return None
    source, axis = eqn.invars[0], eqn.params["axis"]
    squeezed = bool(path) and tuple(path[0].params["dimensions"]) == (axis,) and axis == source.aval.ndim - 2
    halved = not path and axis == source.aval.ndim - 1
    if source not in made or made[source].primitive.name != "dot_general" or not (squeezed or halved):
        return None
    views += [eqn, *path]
    return source, list(eqn.outvars).index(at), len(eqn.outvars)
