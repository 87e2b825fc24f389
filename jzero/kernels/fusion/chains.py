"""Finds products whose result goes through an elementwise function into another product, and nowhere else.

SwiGLU is one, and GELU of a product and a bias. The function is then one kernel in the forward pass, and one in the
backward pass (`fusion.parts`). In fp8 nothing between the products is written in the compute dtype (`fp8.matmul`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jzero._compat import is_constant
from jzero.kernels.fusion.elementwise import Elementwise, is_elementwise, is_row
from jzero.kernels.trace import Equation, Jaxpr, Variable, users_of


@dataclass(frozen=True, eq=False)
class Chain:
    """An equation `f(parts of the sources) w`.

    Attributes:
      f: of the parts, in the order of the sources.
      sources: results of products, and biases [1, ..., N]; with the shape [P, N] of the parts of a row of each.
      weight: the variable of w.
      skipped: the equations, by identity, that are a part of it.
    """

    f: Elementwise
    sources: tuple[tuple[Variable, tuple[int, int]], ...]
    weight: Variable
    skipped: frozenset[int]

    def parts(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the values of the sources: of products as [M, P, N], of biases as [1, 1, N]."""
        return [x.reshape(-1, *shape) for x, (_, shape) in zip(values, self.sources, strict=True)]


class Chains:
    """The chains of a program.

    Args:
      fits: tells whether the product with a variable may be the first or the last of a chain.
      biases: whether chains may have some.

    Attributes:
      of: equation of the last product, by identity -> the chain.
      skipped: the equations, by identity, that are a part of a chain.
    """

    def __init__(self, jaxpr: Jaxpr, fits: Callable[[Variable], bool] = lambda weight: True, biases: bool = True):
        self._fits, self._biases = fits, biases
        self._made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._users = users_of(jaxpr)
        found = ((id(eqn), self._chain(eqn)) for eqn in jaxpr.eqns if self._multiplies(eqn))
        self.of = {last: chain for last, chain in found if chain}
        self.skipped = frozenset[int]().union(*(chain.skipped for chain in self.of.values()))

    def _multiplies(self, eqn: Equation) -> bool:
        """Return whether it is x [..., K] w [K, ...], all of one dtype of two bytes, with a w that fits."""
        if eqn.primitive.name != "dot_general" or is_constant(eqn.invars[1]) or not self._fits(eqn.invars[1]):
            return False
        x, w, y = (v.aval for v in (*eqn.invars, *eqn.outvars))
        form = form_of(eqn.params["dimension_numbers"], (x.ndim, w.ndim), 1)
        alike = x.dtype == w.dtype == y.dtype and x.dtype.itemsize == 2
        return alike and y.size > 0 and form is not None and form.leading and form.contracted == (x.ndim - 1,)

    def _chain(self, last: Equation) -> Chain | None:
        x, weight = last.invars
        inside: dict[int, Equation] = {}  # the elementwise equations, in order
        parts: dict[Variable, _Part] = {}
        biases: dict[Variable, None] = {}

        def visit(v: Variable) -> bool:
            """Return whether v is computed from parts of products and biases by elementwise equations; note them."""
            eqn = self._made.get(v)
            if v in parts or id(eqn) in inside:
                return True
            if self._biases and is_row(v.aval, x.aval):
                biases[v] = None
                return True
            if eqn is None:
                return False
            if part := self._part(v, eqn, x.aval.ndim):
                parts[v] = part
                whole = v.aval.shape == x.aval.shape  # and no row [1, ..., N]
                return whole and part.source.aval.dtype == dtype and self._multiplies(self._made[part.source])
            if not is_elementwise(eqn, dtype) or not all(visit(u) for u in eqn.invars if not is_constant(u)):
                return False
            inside[id(eqn)] = eqn
            return True

        dtype = last.outvars[0].aval.dtype
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
        if weight in own or any(not self._users.get(v, set()) <= skipped | {id(last)} for v in own):
            return None
        f = Elementwise(tuple(inside.values()), (*(operands[at] for at in order), *biases), x)
        sources = tuple((v, (count, x.aval.shape[-1])) for v, count in [*counts.items(), *((v, 1) for v in biases)])
        return Chain(f, sources, weight, frozenset(skipped))

    def _part(self, v: Variable, eqn: Equation, ndim: int) -> _Part | None:
        """Return v as an equal part of a product's result, if it is one: all of it, [..., P N] or [..., P, N] split."""
        if eqn.primitive.name == "dot_general" and v.aval.ndim == ndim:
            return _Part(v, 0, 1, ())
        squeeze = eqn if eqn.primitive.name == "squeeze" else None
        piece = squeeze.invars[0] if squeeze else v
        split = self._made.get(piece)
        if split is None or split.primitive.name != "split" or len({u.aval.shape for u in split.outvars}) > 1:
            return None
        source, axis = split.invars[0], split.params["axis"]
        along = axis - source.aval.ndim
        cut = along == -2 and tuple(squeeze.params["dimensions"]) == (axis,) if squeeze else along == -1
        if not cut or source not in self._made or self._made[source].primitive.name != "dot_general":
            return None
        views = (split, squeeze) if squeeze else (split,)
        return _Part(source, list(split.outvars).index(piece), len(split.outvars), views)


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
