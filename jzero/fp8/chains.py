"""Finds products whose result goes through an elementwise function into another product, and nowhere else: SwiGLU.

Between the two nothing then needs to be written in the compute dtype: the function's result and, in the backward pass,
the gradients of its operands are cast to fp8 where they are computed (`product.mapped_dot_general`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jzero._compat import is_constant
from jzero.fp8.elementwise import Elementwise, is_elementwise
from jzero.fp8.product import form_of


@dataclass(frozen=True, eq=False)
class Chain:
    """An equation `f(parts of the sources) w`.

    Attributes:
      f: of the parts, in the order of the sources.
      sources: results of products, and the number of parts of each, which lie along the dimension before the last.
      weight: the variable of w.
      skipped: the equations, by identity, that are a part of it.
    """

    f: Elementwise
    sources: tuple[tuple[Any, int], ...]
    weight: Any
    skipped: frozenset[int]


def chains(jaxpr: Any, in_fp8: Callable[[Any], bool]) -> dict[int, Chain]:
    """Find the chains of a program: equation of the last product, by identity -> the chain.

    Args:
      in_fp8: tells whether a variable is a weight in fp8.
    """
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    users: dict[Any, list[int]] = {}
    for eqn in jaxpr.eqns:
        for v in {v for v in eqn.invars if not is_constant(v)}:
            users.setdefault(v, []).append(id(eqn))
    for v in jaxpr.outvars:
        users.setdefault(v, []).append(0)
    found: dict[int, Chain] = {}
    for eqn in jaxpr.eqns:
        if _multiplies(eqn, in_fp8) and (chain := _chain(eqn, made, users, in_fp8)):
            found[id(eqn)] = chain
    return found


def _multiplies(eqn: Any, in_fp8: Callable[[Any], bool]) -> bool:
    """Return whether it is x [..., K] w [K, ...], with w in fp8."""
    if eqn.primitive.name != "dot_general" or is_constant(eqn.invars[1]) or not in_fp8(eqn.invars[1]):
        return False
    x, w = (v.aval for v in eqn.invars)
    form = form_of(eqn.params["dimension_numbers"], (x.ndim, w.ndim), 1)
    return form is not None and form.leading and form.contracted == (x.ndim - 1,) and x.dtype.itemsize == 2


def _chain(last: Any, made: dict[Any, Any], users: dict[Any, list[int]], in_fp8: Any) -> Chain | None:
    equations: list[Any] = []
    views: list[Any] = []
    parts: dict[Any, tuple[Any, int, int]] = {}  # variable -> source, index, count
    ndim = last.invars[0].aval.ndim

    def visit(v: Any) -> bool:
        eqn = made.get(v)
        if v in parts or any(eqn is other for other in equations):
            return True
        if eqn is None:
            return False
        if part := _part(v, made, ndim, views):
            parts[v] = part
            return _multiplies(made[part[0]], in_fp8)
        if not is_elementwise(eqn) or not all(visit(x) for x in eqn.invars if not is_constant(x)):
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
    if any(not set(users.get(v, ())) <= inside | {id(last)} for v in own):
        return None
    f = Elementwise(tuple(equations), tuple(by_part[at] for at in order), last.invars[0])
    return Chain(f, tuple(counts.items()), last.invars[1], frozenset(inside))


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
