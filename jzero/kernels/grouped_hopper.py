"""Grouped products on Hopper GPUs, in Pallas's Mosaic dialect.

One block runs per multiprocessor and takes one tile of the result after another. One of its warpgroups copies operands
into shared memory, through all tiles without a pause; the other two multiply and store. The shape of the loops is that
of JAX's own Hopper matmul (jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jzero.kernels.fusion.parts import Ref
from jzero.kernels.grouped_triton import tile_map

# Tiles of 128 x 256, whose columns the two warpgroups share out, reach 702 TFLOP/s at Mixtral's up projection, and 669
# if they share out the rows; 256 x 128 reach 610, and 128 x 128 595. Bands of 4 or 16 tiles are no faster (an H100,
# experiments/benchmarks/2026-11-25-grouped-product.md).
M = 128  # rows of a tile of the result
K = 64  # the summed dimension per step: a row of it is one 128-byte swizzle
STAGES = 4
BAND = 8  # tiles of rows that share the columns of a matrix while they are in the cache
STORE = 64  # rows and columns per copy of a result
ALIGN = 8  # Mosaic's copies begin at multiples of 8 rows
MEMORY = 2  # the warpgroup that copies; 0 and 1 multiply


Scalar = jax.Array  # int32 []
Index = Sequence[Scalar]


class Scratch(NamedTuple):
    """The memory of one block.

    Attributes:
      a, b: operands in shared memory, [STAGES, ...]. o: two blocks of the result for each warpgroup that multiplies.
      loaded, used: barriers of each stage.
    """

    a: Ref
    b: Ref
    o: Ref
    loaded: Ref
    used: Ref


def supports(rows: int, *dims: int) -> bool:
    """Return whether the kernels take these sizes: Mosaic cuts them into 8 rows x 64 elements."""
    return rows % ALIGN == 0 and all(size % K == 0 for size in dims)


def grouped(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool, cores: int) -> jax.Array:
    """Multiply rows [T, D] by their group's matrix [E, D, F], or [E, F, D] if `transposed`; padding rows give zero."""
    (T, D), E, F, dtype = x.shape, len(w), w.shape[1 if transposed else 2], x.dtype
    N, steps = _width(F), pl.cdiv(D, K)
    columns, half = pl.cdiv(F, N), N // 2
    info, used_tiles = tile_map(sizes, T, M, ALIGN)

    def body(info_gmem, tiles_gmem, x_gmem, w_gmem, o_gmem, **scratch) -> None:  # type: ignore[no-untyped-def]
        # info [4, most tiles] and tiles [1] of `tile_map`, x [T, D], w [E, D, F] or [E, F, D], o [T, F].
        smem, wg, tiles = Scratch(**scratch), lax.axis_index("wg"), tiles_gmem[0]
        grid = (tiles * columns,)

        def place(index: Index) -> tuple[Scalar, ...]:
            i, j = plgpu.planar_snake(index[0], (tiles, columns), 0, BAND)
            group, start = info_gmem[0, i], pl.multiple_of(info_gmem[1, i], ALIGN)
            # Tiles of padding have no steps: they store zeros.
            return (
                group,
                start,
                info_gmem[2, i],
                info_gmem[3, i],
                j,
                jnp.where(group < E, jnp.int32(steps), jnp.int32(0)),
            )

        @pl.when(wg == MEMORY)
        def _() -> None:
            def copy(index: Index, k: Scalar, slot: Scalar) -> None:
                group, start, _, _, j, _ = place(index)
                at_k, at_n = pl.ds(k * K, K), pl.ds(j * N, N)
                w_at = w_gmem.at[group, at_n, at_k] if transposed else w_gmem.at[group, at_k, at_n]
                plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(start, M), at_k], smem.a.at[slot], smem.loaded.at[slot])
                plgpu.copy_gmem_to_smem(w_at, smem.b.at[slot], smem.loaded.at[slot])

            _load(grid, lambda index: place(index)[-1], copy, smem)

        @pl.when(wg != MEMORY)
        def _() -> None:
            def compute(index: Index, acc: Ref, done: Scalar) -> Scalar:
                _, start, begin, end, j, count = place(index)
                left = wg * half

                def multiply(k: Scalar, slot: Scalar) -> None:
                    b = smem.b.at[slot, pl.ds(left, half)] if transposed else smem.b.at[slot, :, pl.ds(left, half)]
                    plgpu.wgmma(acc, smem.a.at[slot], b.transpose((1, 0)) if transposed else b)

                _accumulate(count, done, multiply, smem)
                _store_rows(acc[...].astype(dtype), wg, smem.o, o_gmem, (start, begin, end), j * N + left)
                return count

            _compute(grid, (M, half), compute)

    kernel = _kernel(body, (T, F), (M, K), (N, K) if transposed else (K, N), dtype, cores)
    return kernel(info, used_tiles, x, w)


def grouped_transposed(x: jax.Array, dy: jax.Array, sizes: jax.Array, *, cores: int) -> jax.Array:
    """Multiply each group's rows [T, D], transposed, by the same rows of [T, F]: [E, D, F]; zero for empty groups."""
    D, F, E, dtype = x.shape[1], dy.shape[1], len(sizes), x.dtype
    N, half = _width(F), M // 2
    rows, columns = pl.cdiv(D, M), pl.cdiv(F, N)
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    starts = ends - sizes
    # Of each group the row from which copies go, and, counted from there, its begin, its end and that of all groups.
    first = starts // ALIGN * ALIGN
    info = jnp.stack([first, starts - first, jnp.where(sizes > 0, ends - first, 0), jnp.full(E, ends[-1]) - first])

    def body(info_gmem, x_gmem, dy_gmem, o_gmem, **scratch) -> None:  # type: ignore[no-untyped-def]
        # info [4, E], x [T, D], dy [T, F], o [E, D, F].
        smem, wg, grid = Scratch(**scratch), lax.axis_index("wg"), (E, rows * columns)

        def place(index: Index) -> tuple[Scalar, ...]:
            i, j = plgpu.planar_snake(index[1], (rows, columns), 0, BAND)
            return index[0], i, j, lax.div(info_gmem[2, index[0]] + (K - 1), jnp.int32(K))

        @pl.when(wg == MEMORY)
        def _() -> None:
            def copy(index: Index, k: Scalar, slot: Scalar) -> None:
                group, i, j, _ = place(index)
                at = pl.ds(pl.multiple_of(info_gmem[0, group] + k * K, ALIGN), K)
                plgpu.copy_gmem_to_smem(x_gmem.at[at, pl.ds(i * M, M)], smem.a.at[slot], smem.loaded.at[slot])
                plgpu.copy_gmem_to_smem(dy_gmem.at[at, pl.ds(j * N, N)], smem.b.at[slot], smem.loaded.at[slot])

            _load(grid, lambda index: place(index)[-1], copy, smem)

        @pl.when(wg != MEMORY)
        def _() -> None:
            def compute(index: Index, acc: Ref, done: Scalar) -> Scalar:
                group, i, j, count = place(index)
                begin, end, padding = info_gmem[1, group], info_gmem[2, group], info_gmem[3, group]
                top = wg * half

                def multiply(k: Scalar, slot: Scalar) -> None:
                    a = smem.a.at[slot, :, pl.ds(top, half)]
                    at, next_at = k * K, (k + 1) * K

                    @pl.when((at < begin) | (next_at > end))
                    def _() -> None:  # rows of other groups
                        _mask(a, begin - at, end - at)

                    @pl.when(next_at > padding)
                    def _() -> None:  # padding may hold NaN, which zeros do not remove; both warpgroups write the same
                        for n in range(N // STORE):
                            _mask(smem.b.at[slot, :, pl.ds(n * STORE, STORE)], begin - at, end - at)

                    plgpu.wgmma(acc, a.transpose((1, 0)), smem.b.at[slot])

                _accumulate(count, done, multiply, smem)
                _store(acc[...].astype(dtype), wg, smem.o, o_gmem.at[group], i * M + top, j * N)
                return count

            _compute(grid, (half, N), compute)

    return _kernel(body, (E, D, F), (K, M), (K, N), dtype, cores)(info, x, dy)


def _width(columns: int) -> int:
    """Choose the columns of a tile; narrow ones run at 0.87 of the speed, but waste less where they do not fit."""
    return 256 if 0.87 * pl.cdiv(columns, 256) * 256 <= pl.cdiv(columns, 128) * 128 else 128


def _kernel(
    body: Callable[..., None],
    out: tuple[int, ...],
    a: tuple[int, int],
    b: tuple[int, int],
    dtype: DTypeLike,
    cores: int,
) -> Callable[..., jax.Array]:
    swizzle = plgpu.TilingTransform((8, K)), plgpu.SwizzleTransform(128)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, dtype),
        scratch_types={
            "a": plgpu.SMEM((STAGES, *a), dtype, transforms=swizzle),
            "b": plgpu.SMEM((STAGES, *b), dtype, transforms=swizzle),
            "o": plgpu.SMEM((2, 2, STORE, STORE), dtype),
            # Two copies arrive at a stage once loaded, and the two warpgroups that multiply once it is used.
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "used": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        },
        grid=(cores,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _slot(step: Scalar) -> Scalar:
    return lax.rem(step, jnp.int32(STAGES))


def _load(
    grid: tuple, steps_of: Callable[[Index], Scalar], copy: Callable[[Index, Scalar, Scalar], None], smem: Scratch
) -> None:
    """Copy the operands of one tile after another; `copy(index, k, slot)` starts the copies of step `k`."""
    # Copies need few. 128 threads x (40 + 2 x 232) are 64,512 of the multiprocessor's 65,536 registers.
    plgpu.set_max_registers(40, action="decrease")

    @plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))
    def total(info: Any, carry: Scalar) -> Scalar:
        def step(k: Scalar, done: Scalar) -> Scalar:
            @pl.when(done >= STAGES)
            def _() -> None:
                plgpu.barrier_wait(smem.used.at[_slot(done)])

            copy(info.index, k, _slot(done))
            return done + 1

        return lax.fori_loop(0, steps_of(info.index), step, carry)

    @pl.loop(jnp.maximum(total - STAGES, 0), total)  # type: ignore[operator]
    def _(step: Scalar) -> None:  # a block must not end with an arrival that nobody waited for
        plgpu.barrier_wait(smem.used.at[_slot(step)])


def _compute(grid: tuple, shape: tuple[int, int], compute: Callable[[Index, Ref, Scalar], Scalar]) -> None:
    """Compute one tile after another; `compute(index, acc, done)` returns its number of steps."""
    # The accumulator alone, [128, 128] or [64, 256] in float32, takes 128 of each of a warpgroup's 128 threads.
    plgpu.set_max_registers(232, action="increase")

    @plgpu.nd_loop(grid, collective_axes="sm", init_carry=jnp.int32(0))
    def _(info: Any, carry: Scalar) -> Scalar:
        return carry + pl.run_scoped(lambda acc: compute(info.index, acc, carry), plgpu.ACC(shape, jnp.float32))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _accumulate(steps: Scalar, done: Scalar, multiply: Callable[[Scalar, Scalar], None], smem: Scratch) -> None:
    """Run the steps of a tile; `multiply(k, slot)` starts adding a product to the accumulator."""

    def step(k: Scalar, _: None) -> None:
        plgpu.barrier_wait(smem.loaded.at[_slot(done + k)])
        multiply(k, _slot(done + k))
        # This product goes on while the next operands are awaited; the one before it has ended.
        plgpu.wgmma_wait(1)

        @pl.when(k > 0)
        def release() -> None:  # the product of the step before is complete, so its operands may be overwritten
            plgpu.barrier_arrive(smem.used.at[_slot(done + k - 1)])

    lax.fori_loop(0, steps, step, None)
    plgpu.wgmma_wait(0)

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_arrive(smem.used.at[_slot(done + steps - 1)])


def _mask(smem: Ref, begin: Scalar, end: Scalar) -> None:
    """Zero the rows before `begin` and from `end` on."""
    # With each warpgroup masking its own half of x, and dy only beside padding, masks cost 5 % at Qwen's uneven groups;
    # with both masking all operands they cost 30 % (an H100).
    index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, smem.shape, 0), plgpu.Layout.WGMMA)
    value = smem[...]  # [K, columns]
    smem[...] = jnp.where((index >= begin) & (index < end), value, jnp.zeros_like(value))
    # The tensor cores, as the copies, see only writes to shared memory that are committed.
    plgpu.commit_smem()


def _blocks(value: jax.Array, wg: Scalar, o_smem: Ref) -> Iterator[tuple[int, int, int]]:
    """Yield (buffer in shared memory, row, column) of each block of a result, from two buffers in turn."""
    rows, columns = value.shape
    for i, row in enumerate(range(0, rows, STORE)):
        for j, column in enumerate(range(0, columns, STORE)):
            slot = (i * (columns // STORE) + j) % 2
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            o_smem[wg, slot] = value[row : row + STORE, column : column + STORE]
            plgpu.commit_smem()
            yield slot, row, column


def _store(value: jax.Array, wg: Scalar, o_smem: Ref, o_gmem: Ref, row: Scalar, column: Scalar) -> None:
    for slot, i, j in _blocks(value, wg, o_smem):
        plgpu.copy_smem_to_gmem(o_smem.at[wg, slot], o_gmem.at[pl.ds(row + i, STORE), pl.ds(column + j, STORE)])


def _store_rows(
    value: jax.Array, wg: Scalar, o_smem: Ref, o_gmem: Ref, rows: tuple[Scalar, Scalar, Scalar], column: Scalar
) -> None:
    """Store the rows from `begin` to `end` after a first one, which are `rows`."""
    row, begin, end = rows
    for slot, i, j in _blocks(value, wg, o_smem):
        at, stop = (jnp.clip(edge - i, 0, STORE) for edge in (begin, end))
        # A copy has a fixed shape, so rows go in powers of two.
        size, left = STORE, stop - at
        while size:
            taken = left & size
            source = o_smem.at[wg, slot, pl.ds(at, size)]
            target = o_gmem.at[pl.ds(row + i + at, size), pl.ds(column + j, STORE)]
            pl.when(taken != 0)(functools.partial(plgpu.copy_smem_to_gmem, source, target, commit_group=False))
            at, size = at + taken, size // 2
        plgpu.commit_smem_to_gmem_group()
