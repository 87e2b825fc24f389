"""Elementwise functions as Triton kernels (Pallas)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jzero.fusion.elementwise import each

TILE, COLUMNS, WARPS = 1024, 512, 4  # elements of a part, at most as many columns


def supports(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the kernel takes and returns arrays [m, p, n]."""
    (m, _, n), parts = shapes[0], [p for _, p, _ in shapes]
    rows, columns = _tile(n)
    return m % rows == 0 and columns >= 128 and m * n * max(parts) < 2**31 and all(p & (p - 1) == 0 for p in parts)


def _tile(n: int) -> tuple[int, int]:
    columns = min(n & -n, COLUMNS)  # a power of two that divides n
    return TILE // columns, columns


def map_parts(f: Callable, *xs: jax.Array, parts: Sequence[int]) -> list[jax.Array]:
    """Compute `parts.map_parts` tile by tile."""
    m, _, n = xs[0].shape
    rows, columns = _tile(n)

    def kernel(*refs: Any) -> None:
        sources, results = refs[: len(xs)], refs[len(xs) :]
        found = iter(f(*each(sources)))
        for ref, count in zip(results, parts, strict=True):
            for p, y in enumerate(itertools.islice(found, count)):
                ref[:, p, :] = y.astype(ref.dtype)

    def tile(p: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, p, columns), lambda i, j: (i, 0, j))

    return pl.pallas_call(
        kernel,
        grid=(m // rows, n // columns),
        in_specs=[tile(x.shape[1]) for x in xs],
        out_specs=[tile(p) for p in parts],
        out_shape=[jax.ShapeDtypeStruct((m, p, n), xs[0].dtype) for p in parts],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=2),
        name="map_parts",
    )(*xs)
