"""Products of a trace as products of matrices."""

from __future__ import annotations

from typing import Any, NamedTuple


class Form(NamedTuple):
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


def form_of(dimension_numbers: Any, ndims: tuple[int, int], weight: int) -> Form | None:
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
    return Form(weight == 0, rows, contracted, leading)
