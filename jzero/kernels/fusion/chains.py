"""Finds products whose result goes through an elementwise function into other products, and nowhere else.

SwiGLU is one, and GELU of a product and a bias. The function is then one kernel in the forward pass, and one in the
backward pass (`fusion.parts`). In fp8 nothing between the products is written in the compute dtype (`fp8.matmul`).

With low-rank adapters, sums of two products go in, which cuBLAS adds up in the second one, and two products come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.tree_util import Partial

from jzero._compat import is_constant
from jzero.kernels.fusion.elementwise import Elementwise, is_elementwise, is_row
from jzero.kernels.fusion.parts import FROZEN, Weight
from jzero.kernels.trace import Equation, Jaxpr, Read, Variable, users_of


@dataclass(frozen=True, eq=False)
class Chain:
    """Equations `f(parts of the sources) w`, one for each of some w.

    Attributes:
      f: of the parts, in the order of the sources.
      sources: results of products or their sums, and biases [1, ..., N]; with the shape [P, N] of the parts of a row.
      products: these equations, in order.
      skipped: the equations, by identity, that f takes the place of.
    """

    f: Elementwise
    sources: tuple[tuple[Variable, tuple[int, int]], ...]
    products: tuple[Equation, ...]
    skipped: frozenset[int]

    @property
    def operands(self) -> int:
        """The number of arrays [M, N] that f reads."""
        return sum(count for v, (count, _) in self.sources if v.aval.size > v.aval.shape[-1])

    def parts(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the values of the sources: of products as [M, P, N], of biases as [1, 1, N]."""
        return [x.reshape(-1, *shape) for x, (_, shape) in zip(values, self.sources, strict=True)]


class BiasedCut(NamedTuple):
    """A product's result cut into equal parts, with a row added to each: queries, keys and values with their biases.

    Attributes:
      source: the product's result.
      rows: [1, ..., N] for each part, or one for all.
      results: the parts with their rows.
    """

    source: Variable
    rows: tuple[Variable, ...]
    results: tuple[Variable, ...]


class Chains:
    """The chains of a program.

    Args:
      fits: tells whether the product with a variable may be the first or the last of a chain.
      plain: whether a chain has one last product, no frozen matrices, no biases, and no sums of products.

    Attributes:
      of: equation of a last product, by identity -> the chain.
      skipped: the equations, by identity, that the chains' functions take the place of.
      biased_cuts: equation that cuts, by identity -> the cut.
    """

    def __init__(self, jaxpr: Jaxpr, fits: Callable[[Variable], bool] = lambda weight: True, plain: bool = False):
        self._fits, self._plain = fits, plain
        self._made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
        self._users, self._terms = users_of(jaxpr), set[Variable]()
        for eqn in jaxpr.eqns:
            if self.multiplies(eqn) or self._is_sum(eqn):
                self._terms.update(eqn.outvars)
        self.of: dict[int, Chain] = {}
        for eqn in jaxpr.eqns:
            if id(eqn) not in self.of and self.multiplies(eqn) and (chain := self._chain(eqn)):
                self.of |= dict.fromkeys(map(id, chain.products), chain)
        self.skipped = frozenset[int]().union(*(chain.skipped for chain in self.of.values()))
        cuts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "split" and id(eqn) not in self.skipped]
        self.biased_cuts = {id(eqn): cut for eqn in cuts if (cut := self._biased_cut(eqn))}

    def multiplies(self, eqn: Equation) -> bool:
        """Return whether it is x [..., K] w [K, ...], all of one dtype of two bytes; w fits, or is frozen."""
        if eqn.primitive.name not in ("dot_general", FROZEN):
            return False
        x, w, y = (v.aval for v in (*eqn.invars[:2], *eqn.outvars))
        if x.dtype != y.dtype or x.dtype.itemsize != 2 or not x.size * y.size:
            return False
        if eqn.primitive.name == FROZEN:
            return not self._plain
        form = form_of(eqn.params["dimension_numbers"], (x.ndim, w.ndim), 1)
        fits = w.dtype == x.dtype and not is_constant(eqn.invars[1]) and self._fits(eqn.invars[1])
        return fits and form is not None and form.leading and form.contracted == (x.ndim - 1,)

    def _chain(self, first: Equation) -> Chain | None:
        """Return the chain that ends in this product and those beside it, or None."""
        x, products = first.invars[0], self._alike(first)
        inside: dict[int, Equation] = {}  # the elementwise equations, in order
        parts: dict[Variable, _Part] = {}
        biases: dict[Variable, None] = {}

        def visit(v: Variable) -> bool:
            """Return whether v is computed from parts of products and biases by elementwise equations; note them."""
            eqn = self._made.get(v)
            if v in parts or id(eqn) in inside:
                return True
            if not self._plain and is_row(v.aval, x.aval):
                biases[v] = None
                return True
            if eqn is None:
                return False
            if part := self._part(v, eqn, x.aval.ndim):
                parts[v] = part
                whole = v.aval.shape == x.aval.shape  # and no row [1, ..., N]
                return whole and part.source.aval.dtype == dtype
            if not is_elementwise(eqn, dtype) or not all(visit(u) for u in eqn.invars if not is_constant(u)):
                return False
            inside[id(eqn)] = eqn
            return True

        dtype = first.outvars[0].aval.dtype
        if not visit(x) or not inside or not parts:
            return None
        counts = {part.source: part.parts for part in parts.values()}
        operands = {(part.source, part.number): v for v, part in parts.items()}
        order = [(source, i) for source, count in counts.items() for i in range(count)]
        if len(operands) < len(parts) or set(order) != operands.keys():
            return None  # an unused part would have no gradient
        views = [eqn for part in parts.values() for eqn in part.views]
        skipped = {*inside, *map(id, views)}
        own = {*counts, *parts, *(v for eqn in (*inside.values(), *views) for v in eqn.outvars)}
        users = skipped.union(map(id, products))
        weights = [v for eqn in products for v in eqn.invars[1:]]
        if not own.isdisjoint(weights) or any(not self._users.get(v, {}).keys() <= users for v in own):
            return None
        f = Elementwise(tuple(inside.values()), (*(operands[at] for at in order), *biases), x)
        sources = tuple((v, (count, x.aval.shape[-1])) for v, count in [*counts.items(), *((v, 1) for v in biases)])
        return Chain(f, sources, products, frozenset(skipped))

    def _alike(self, first: Equation) -> tuple[Equation, ...]:
        """Return the products with the same left factor that can be computed together with this one."""

        def fits(eqn: Equation | None) -> bool:
            if eqn is None or not self.multiplies(eqn) or eqn.invars[0] is not first.invars[0]:
                return False
            made = [self._made[v] for v in eqn.invars[1:] if v in self._made]
            start = self._order[id(first)]  # its weight may not wait for the result of this one
            known = self._order[id(eqn)] >= start and all(self._order[id(one)] < start for one in made)
            return known and eqn.params.get("precision") == first.params.get("precision")

        if self._plain:
            return (first,)
        return tuple(eqn for eqn in self._users[first.invars[0]].values() if eqn and fits(eqn))

    def _adds_up(self, v: Variable) -> bool:
        """Return whether v is the result of a product of the form above, or a sum of such results."""
        return not is_constant(v) and v in self._terms

    def _is_sum(self, eqn: Equation) -> bool:
        if self._plain or eqn.primitive.name not in ("add", "add_any"):
            return False
        return all(v.aval.shape == eqn.outvars[0].aval.shape and self._adds_up(v) for v in eqn.invars)

    def _biased_cut(self, eqn: Equation) -> BiasedCut | None:
        (source,), parts, axis = eqn.invars, tuple(eqn.outvars), eqn.params["axis"]
        made, shape = self._made.get(source), source.aval.shape
        # With an odd length attention pads queries, keys and values: XLA cuts their gradients on the way.
        if made is None or axis < 1 or shape[axis - 1] % 2 or len({v.aval.shape for v in parts}) > 1:
            return None

        def is_tail(v: Variable, of: Variable) -> bool:
            shape = (*(1,) * axis, *of.aval.shape[axis:])
            if is_constant(v) or v.aval.shape != shape or v.aval.dtype != of.aval.dtype:
                return False
            return v not in self._made or self._order[id(self._made[v])] < self._order[id(eqn)]

        if made.primitive.name == "add" and len(self._users[source]) == 1:
            product, row = made.invars
            return BiasedCut(product, (row,), parts) if self._adds_up(product) and is_tail(row, source) else None
        sums = [user for v in parts for user in self._users.get(v, {}).values()]
        if not self._adds_up(source) or [one and one.primitive.name for one in sums] != ["add"] * len(parts):
            return None
        terms = [one.invars for one in sums if one]
        if any(a is not v or not is_tail(row, v) for (a, row), v in zip(terms, parts, strict=True)):
            return None
        return BiasedCut(source, tuple(row for _, row in terms), tuple(one.outvars[0] for one in sums if one))

    def _part(self, v: Variable, eqn: Equation, ndim: int) -> _Part | None:
        """Return v as an equal part of what adds up, if it is one: all of it, [..., P N] or [..., P, N] split."""
        if self._adds_up(v) and v.aval.ndim == ndim:
            return _Part(v, 0, 1, ())
        squeeze = eqn if eqn.primitive.name == "squeeze" else None
        piece = squeeze.invars[0] if squeeze else v
        split = self._made.get(piece)
        if split is None or split.primitive.name != "split" or len({u.aval.shape for u in split.outvars}) > 1:
            return None
        source, axis = split.invars[0], split.params["axis"]
        along = axis - source.aval.ndim
        cut = along == -2 and tuple(squeeze.params["dimensions"]) == (axis,) if squeeze else along == -1
        if not cut or not self._adds_up(source):
            return None
        views = (split, squeeze) if squeeze else (split,)
        return _Part(source, list(split.outvars).index(piece), len(split.outvars), views)


def weight_of(eqn: Equation, read: Read[jax.Array]) -> Weight:
    """Return the weight of a product that `Chains.multiplies` takes."""
    w = read(eqn.invars[1:])
    return Partial(eqn.params["make"], *w) if eqn.primitive.name == FROZEN else w[0]


class _Part(NamedTuple):
    """Part `number` of all `parts` of a product's result; `views` cut it out."""

    source: Variable
    number: int
    parts: int
    views: tuple[Equation, ...]


DotDimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]  # contracted, batch


class MatmulForm(NamedTuple):
    """A product of an activation and a weight as one of matrices.

    Attributes:
      weight_first: whether the weight is the left factor.
      rows: the activation's dimensions that are not contracted.
      contracted: the activation's contracted dimensions, in the order of the weight's.
      leading: whether the weight's contracted dimensions come first: it is [K, N], else [N, K].
    """

    weight_first: bool
    rows: tuple[int, ...]
    contracted: tuple[int, ...]
    leading: bool


def form_of(dimension_numbers: DotDimensions, ndims: tuple[int, int], weight: int) -> MatmulForm | None:
    """Return the form of a `dot_general` whose factor number `weight` is the weight; None if it has none."""
    contracting, batch = dimension_numbers
    if batch[0]:
        return None
    pairs = sorted(zip(contracting[weight], contracting[1 - weight], strict=True))
    of_weight, contracted = [w for w, _ in pairs], tuple(a for _, a in pairs)
    ndim, n = ndims[weight], len(pairs)
    leading = of_weight == list(range(n))
    if not 0 < n < ndim or not (leading or of_weight == list(range(ndim - n, ndim))):
        return None
    rows = tuple(d for d in range(ndims[1 - weight]) if d not in contracted)
    return MatmulForm(weight == 0, rows, contracted, leading)
