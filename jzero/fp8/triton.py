"""Casts to fp8 as Triton kernels (Pallas)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jzero.fp8.quantized import amax, cast8
from jzero.fusion.elementwise import each

# Of a tile. Measured on an H200 from 32x128 to 256x64: 2.8 to 3.4 TB/s; this one was among the fastest for every shape.
ROWS, COLUMNS, WARPS = 32, 128, 4


def supports(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> bool:
    """Return whether the kernel takes arrays [m, p, n], and returns [m, q n]."""
    m, _, n = shapes[0]
    parts = [p for _, p, _ in shapes] + [out[1] // n]
    largest = m * n * max(parts)
    return m % ROWS == 0 and n % COLUMNS == 0 and largest < 2**31 and all(p & (p - 1) == 0 for p in parts)


def cast_pair(f: Callable, *operands: jax.Array, dtype: Any, with_amax: bool) -> tuple[jax.Array, ...]:
    """Compute `casts.cast_pair`: write each tile of the results, and its transpose, and its largest element."""
    *xs, scale = operands
    (m, _, n), read = xs[0].shape, sum(x.shape[1] for x in xs)
    made = len(jax.eval_shape(f, *[jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)] * read))

    def kernel(*refs: Any) -> None:
        (*x_refs, scale_ref), (out_ref, transposed_ref, *amax_refs) = refs[: len(operands)], refs[len(operands) :]
        ys = f(*each(x_refs))
        for q, y in enumerate(ys):
            y8 = cast8(y, scale_ref[0], dtype)
            out_ref[:, q, :] = y8
            transposed_ref[q, :, :] = y8.T
        for ref in amax_refs:
            ref[0, 0] = amax(*ys)

    grid = m // ROWS, n // COLUMNS
    out, transposed, *largest = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            *(pl.BlockSpec((ROWS, x.shape[1], COLUMNS), lambda i, j: (i, 0, j)) for x in xs),
            pl.BlockSpec((1,), lambda i, j: (0,)),
        ],
        out_specs=[
            pl.BlockSpec((ROWS, made, COLUMNS), lambda i, j: (i, 0, j)),
            pl.BlockSpec((made, COLUMNS, ROWS), lambda i, j: (0, j, i)),
            *[pl.BlockSpec((1, 1), lambda i, j: (i, j))] * with_amax,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((m, made, n), dtype),
            jax.ShapeDtypeStruct((made, n, m), dtype),
            *[jax.ShapeDtypeStruct(grid, jnp.float32)] * with_amax,
        ],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=2),
        name="fp8_cast_pair",
    )(*xs, scale.reshape(1))
    return out.reshape(m, -1), transposed.reshape(-1, m), *map(amax, largest)
