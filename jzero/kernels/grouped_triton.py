"""Grouped products on other NVIDIA GPUs, as Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jzero.kernels.fusion.parts import Ref

BAND = 8  # tiles of rows that share the columns of a matrix while they are in the cache


class Blocks(NamedTuple):
    """A block multiplies [m, k] by [k, n] at a time."""

    m: int
    n: int
    k: int
    warps: int


def _blocks(dtype: DTypeLike) -> Blocks:
    """Choose blocks whose stages fit in the shared memory of a consumer's Ada GPU (99 KiB)."""
    return Blocks(64, 64, 32, 4) if dtype == jnp.float32 else Blocks(128, 128, 64, 8)


def grouped(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool, dtype: DTypeLike) -> jax.Array:
    """Multiply rows [T, D] by their group's matrix [E, D, F], or [E, F, D] if `transposed`; padding rows give zero."""
    (T, D), E, F, blocks = x.shape, len(w), w.shape[1 if transposed else 2], _blocks(x.dtype)
    m, n, k, _ = blocks
    info, _ = tile_map(sizes, T, m, 1)
    tiles, columns = max_tiles(T, E, m, 1), pl.cdiv(F, n)

    # info [4, tiles] of `tile_map`, x [T, D], w [E, D, F] or [E, F, D], o [T, F]
    def kernel(info_ref: Ref, x_ref: Ref, w_ref: Ref, o_ref: Ref) -> None:
        i, j = _place(pl.program_id(0), tiles, columns)
        group, start, end = info_ref[0, i], info_ref[1, i], info_ref[3, i]
        rows, at_n = start + jnp.arange(m), j * n + jnp.arange(n)
        inside, wide = jnp.arange(m) < end, at_n < F

        def step(s: jax.Array, acc: jax.Array) -> jax.Array:
            at_k = s * k + jnp.arange(k)
            deep = at_k < D
            a = triton.load(x_ref.at[rows[:, None], at_k[None]], mask=inside[:, None] & deep[None], other=0)
            at = (group, at_n[:, None], at_k[None]) if transposed else (group, at_k[:, None], at_n[None])
            mask = wide[:, None] & deep[None] if transposed else deep[:, None] & wide[None]
            b = triton.load(w_ref.at[at], mask=mask, other=0)
            return acc + jnp.dot(a, b.T if transposed else b, preferred_element_type=jnp.float32)

        # Unused tiles, past those of the actual sizes, end at row 0; those of padding have no steps, and store zeros.
        @pl.when(end > 0)
        def _() -> None:
            steps = jnp.where(group < E, jnp.int32(pl.cdiv(D, k)), jnp.int32(0))
            acc = lax.fori_loop(0, steps, step, jnp.zeros((m, n), jnp.float32))
            mask = inside[:, None] & wide[None]
            triton.store(o_ref.at[rows[:, None], at_n[None]], acc.astype(o_ref.dtype), mask=mask)

    out = jax.ShapeDtypeStruct((T, F), dtype)
    return _call(kernel, out, (tiles * columns,), blocks)(info, x, w)


def grouped_transposed(x: jax.Array, dy: jax.Array, sizes: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """Multiply each group's rows [T, D], transposed, by the same rows of [T, F]: [E, D, F]."""
    (_, D), (_, F), E, blocks = x.shape, dy.shape, len(sizes), _blocks(x.dtype)
    m, n, k, _ = blocks
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    info = jnp.stack([ends - sizes.astype(jnp.int32), ends])
    rows, columns = pl.cdiv(D, m), pl.cdiv(F, n)

    # info [2, E]: the first row and the end of each group, x [T, D], dy [T, F], o [E, D, F]
    def kernel(info_ref: Ref, x_ref: Ref, dy_ref: Ref, o_ref: Ref) -> None:
        group = pl.program_id(1)
        i, j = _place(pl.program_id(0), rows, columns)
        start, end = info_ref[0, group], info_ref[1, group]
        at_m, at_n = i * m + jnp.arange(m), j * n + jnp.arange(n)

        def step(s: jax.Array, acc: jax.Array) -> jax.Array:
            at = start + s * k + jnp.arange(k)
            inside = (at < end)[:, None]
            a = triton.load(x_ref.at[at[:, None], at_m[None]], mask=inside & (at_m < D)[None], other=0)
            b = triton.load(dy_ref.at[at[:, None], at_n[None]], mask=inside & (at_n < F)[None], other=0)
            return acc + jnp.dot(a.T, b, preferred_element_type=jnp.float32)

        acc = lax.fori_loop(0, pl.cdiv(end - start, k), step, jnp.zeros((m, n), jnp.float32))
        mask = (at_m < D)[:, None] & (at_n < F)[None]
        triton.store(o_ref.at[group, at_m[:, None], at_n[None]], acc.astype(o_ref.dtype), mask=mask)

    out = jax.ShapeDtypeStruct((E, D, F), dtype)
    return _call(kernel, out, (rows * columns, E), blocks)(info, x, dy)


def _place(i: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Go through the tiles in bands of rows, so that neighbours share operands in the cache."""
    band, within = lax.div(i, BAND * columns), lax.rem(i, BAND * columns)
    height = jnp.minimum(rows - band * BAND, BAND)
    return band * BAND + lax.rem(within, height), lax.div(within, height)


def _call(kernel: Callable, out: jax.ShapeDtypeStruct, grid: tuple[int, ...], blocks: Blocks) -> Callable:
    whole, params = pl.BlockSpec(memory_space=pl.ANY), triton.CompilerParams(num_warps=blocks.warps, num_stages=3)
    return pl.pallas_call(
        kernel, out_shape=out, grid=grid, in_specs=[whole] * 3, out_specs=whole, compiler_params=params
    )


def tile_map(sizes: jax.Array, rows: int, m: int, align: int) -> tuple[jax.Array, jax.Array]:
    """Cut groups of rows into tiles that never cross groups; the padding rows are one more group.

    Returns:
        [4, tiles] int32: each tile's group, its first row (a multiple of `align`), and which
        of its rows belong to the group: from, to; and the number of tiles in use, [1].
    """
    groups = len(sizes)
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    starts, ends = jnp.append(jnp.zeros(1, jnp.int32), ends), jnp.append(ends, rows)
    aligned = starts // align * align
    tiles = jnp.where(ends > starts, (ends - aligned + m - 1) // m, 0)
    last = jnp.cumsum(tiles)
    i = jnp.arange(max_tiles(rows, groups, m, align), dtype=jnp.int32)
    # A tile's group is the number of groups whose tiles end before it; JAX's search would be a loop.
    group = jnp.minimum(jnp.sum(last[None] <= i[:, None], axis=1, dtype=jnp.int32), groups)
    first = aligned[group] + (i - (last - tiles)[group]) * m
    begin = jnp.maximum(starts[group] - first, 0)
    return jnp.stack([group, first, begin, jnp.clip(ends[group] - first, begin, m)]), last[-1:]


def max_tiles(rows: int, groups: int, m: int, align: int) -> int:
    """Count the tiles of the worst sizes: each group and the padding may begin `align - 1` rows early."""
    return (rows + (groups + 1) * (m - 1 + align - 1)) // m
