"""Elementwise functions of the parts of arrays, in one pass over memory where there is a kernel; and their products."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from jzero._compat.kernels import function_primitive
from jzero.kernels.fusion.elementwise import Elementwise, Pullback, each
from jzero.kernels.trace import Equation

Precision = lax.PrecisionLike
Ref = Any  # an array in a kernel of Pallas
Shapes = Sequence[jax.core.ShapedArray]
_BEFORE_AMPERE = re.compile(r"\b(T4|[PV]100|TITAN|GTX|RTX 20\d\d|RTX [3-8]000)\b")


def map_parts(f: Callable, xs: Sequence[jax.Array], parts: Sequence[int]) -> list[jax.Array]:
    """Compute an elementwise function of all parts of some arrays.

    Args:
      f: takes one float32 array for each part of each operand, and returns one for each part of each result: [M, N], or
        [1, N] for rows. It may be called on a few of the rows at a time; the rows that it returns are then summed.
      xs: [M, P, N], the first one too, and rows [1, P, N], of one dtype.
      parts: how many parts each result has.

    Returns:
      [M, Q, N] for each Q of `parts`, or [1, Q, N], in the dtype of xs.
    """
    jaxpr = jax.make_jaxpr(partial(_plain, f, tuple(parts)))(*xs)
    return _primitive.bind(*xs, jaxpr=jaxpr, f=f)


class Device(Protocol):
    """A device, or a mesh's description of its devices."""

    platform: str
    device_kind: str


def has_triton(device: Device) -> bool:
    """Return whether Triton's kernels run on a device: NVIDIA's from Ampere on."""
    return device.platform == "gpu" and not _BEFORE_AMPERE.search(device.device_kind)


def _plain(f: Callable, parts: tuple[int, ...], *xs: jax.Array) -> list[jax.Array]:
    found = iter(f(*each(xs)))
    return [jnp.stack([y.astype(xs[0].dtype) for y in itertools.islice(found, n)], axis=1) for n in parts]


def _kernel(operands: Shapes, results: Shapes, device: Device, f: Callable) -> Callable | None:
    """Choose a kernel; None: XLA's program."""
    shapes = [y.shape for y in results]
    if not has_triton(device) or not supports_elementwise([x.shape for x in operands], shapes):
        return None
    return partial(tiled_map_parts, f, results=shapes)


MAP_PARTS, MAP_PARTS_IN_SLOT = "map_parts", "map_parts_in_slot"
_primitive = function_primitive(MAP_PARTS, _kernel)


def map_parts_in_slot(
    eqn: Equation,
    xs: Sequence[jax.Array],
    index: jax.Array | int,
    reads: dict[int, jax.Array],
    copies: dict[int, jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Compute a `map_parts` with operands from a slot of buffers, and copy others into it, all in one pass over memory.

    A kernel takes whole arrays: XLA would copy the slot before it, whose index only the device knows. It still does for
    buffers of 2^31 numbers or more, beyond the kernel's 32-bit places.

    Args:
      eqn: of `map_parts`, in a trace.
      xs: its operands.
      index: of the slot, an integer.
      reads: by their numbers, the operands' buffers [S, ...] to read instead.
      copies: by their numbers, the operands' buffers to copy to.

    Returns:
      The results, and the buffers of `copies` with the operands.
    """
    reads, copied = {i: b.reshape(len(b), *xs[i].shape) for i, b in reads.items()}, tuple(copies)
    buffers = [copies[i].reshape(len(copies[i]), *xs[i].shape) for i in copied]
    operands = [jnp.int32(index), *(reads.get(i, x) for i, x in enumerate(xs)), *buffers]
    jaxpr = jax.make_jaxpr(partial(_plain_in_slot, eqn, copied))(*operands)
    found = _in_slot.bind(*operands, jaxpr=jaxpr, f=eqn.params["f"], copied=copied)
    stop = len(found) - len(copied)
    return found[:stop], [y.reshape(copies[i].shape) for i, y in zip(copied, found[stop:], strict=True)]


def _plain_in_slot(eqn: Equation, copied: tuple[int, ...], index: jax.Array, *operands: jax.Array) -> list:
    xs, buffers = operands[: len(operands) - len(copied)], operands[len(operands) - len(copied) :]
    xs = tuple(x if x.ndim == 3 else lax.dynamic_index_in_dim(x, index, keepdims=False) for x in xs)
    new = (lax.dynamic_update_index_in_dim(b, xs[i], index, 0) for i, b in zip(copied, buffers, strict=True))
    return [*_primitive.bind(*xs, **eqn.params), *new]


def _kernel_in_slot(
    operands: Shapes, results: Shapes, device: Device, f: Callable, copied: tuple[int, ...]
) -> Callable | None:
    shapes = [y.shape for y in results[: len(results) - len(copied)]]
    inner = [x.shape[-3:] for x in operands[1 : len(operands) - len(copied)]]
    largest = max(x.size for x in operands)
    if not has_triton(device) or not supports_elementwise(inner, shapes) or largest >= 2**31:
        return None

    def run(index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return tiled_map_parts(f, *operands, results=shapes, index=index, copied=copied)

    return run


_in_slot = function_primitive(MAP_PARTS_IN_SLOT, _kernel_in_slot)

# ------------------------------------------------------------------ as a Triton kernel (Pallas)

# SwiGLU of [8192, 14336] takes 180 to 188 us forward and 363 backward on an H200; tiles half as large are as fast. GELU
# of [32768, 3072] takes 120 us forward, and 132 in tiles half as large.
TILE, COLUMNS = 2048, 512  # elements of a part, at most as many columns
# With sums over rows: each thread has columns of its own, and a program adds up to STEPS tiles; half as many where
# there would be fewer than PROGRAMS programs.
SUM_TILE, SUM_COLUMNS, STEPS, PROGRAMS = 1024, 1024, 32, 1024
Block = tuple[tuple[int, ...], tuple[int | None, ...]]  # shape; which index of the grid counts it, along each dimension


def supports_elementwise(operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the kernel takes and returns arrays [m, p, n] and rows [1, p, n]."""
    rows, columns, steps = _tile(operands[0], results)
    arrays = [shape for shape in (*operands, *results) if shape[0] > 1]
    return bool(arrays) and columns >= 128 and rows * steps > 1 and fit(arrays, rows, columns)


def fit(shapes: Sequence[tuple[int, ...]], rows: int, columns: int) -> bool:
    """Return whether a Triton kernel can cut arrays [m, p, n] into tiles [rows, p, columns]."""
    (m, _, n), parts = shapes[0], [p for _, p, _ in shapes]
    return m % rows == 0 and n % columns == 0 and m * n * max(parts) < 2**31


class Tiles(NamedTuple):
    """A program's tiles of arrays [M, P, N]: `steps` of [rows, P, columns], one below the other."""

    rows: int
    columns: int
    steps: int

    def block(self, shape: tuple[int, ...], sums: bool = False) -> Block:
        """Return a program's block: of arrays its tiles, of rows its columns, of buffers [S, M, P, N] everything."""
        if len(shape) == 4:
            return shape, (None,) * 4
        rows, p, _ = shape
        if rows == 1:
            return (1, p, self.columns), (0 if sums else None, None, 1)
        return (self.rows * self.steps, p, self.columns), (0, None, 1)

    def place(self, ref: Ref, slot: jax.Array | int, step: jax.Array | int, p: int) -> tuple:
        """Return the index of a tile of part p in a program's block; of buffers, in a slot."""
        from jax.experimental import pallas as pl

        if len(ref.shape) == 3:
            return pl.ds(step * self.rows, self.rows), p, slice(None)
        row, column = (pl.program_id(0) * self.steps + step) * self.rows, pl.program_id(1) * self.columns
        return slot, pl.ds(row, self.rows), p, pl.ds(column, self.columns)


def _tile(shape: tuple[int, ...], results: Sequence[tuple[int, ...]]) -> Tiles:
    """Choose the tiles of operands and results [M, P, N] or rows [1, P, N]."""
    (m, _, n), sums = shape, any(rows == 1 for rows, *_ in results)
    columns = min(n & -n, SUM_COLUMNS if sums else COLUMNS)  # a power of two that divides n
    rows = (SUM_TILE if sums else TILE) // columns
    steps = STEPS if m * n >= rows * columns * STEPS * PROGRAMS else STEPS // 2
    return Tiles(rows, columns, max(1, min(steps, (m & -m) // rows)) if sums else 1)


def tiled_map_parts(
    f: Callable, *xs: jax.Array, results: Sequence[tuple[int, ...]], index: jax.Array | None = None,
    copied: tuple[int, ...] = (),
) -> list[jax.Array]:  # fmt: skip
    """Compute `map_parts`, with results of these shapes, tile by tile; with `index`, `map_parts_in_slot`.

    Then operands may be buffers [S, M, P, N], and the buffers of the operands `copied` follow them in xs.
    """
    given, dtype = len(xs) - len(copied), xs[0].dtype
    m, _, n = shape = xs[0].shape[-3:]
    tiles = _tile(shape, results)
    grid = m // (tiles.rows * tiles.steps), n // tiles.columns
    # A sum for each program: another pass over these few replaces atomics.
    made = [
        jax.ShapeDtypeStruct((grid[0], p, n), jnp.float32) if rows == 1 else jax.ShapeDtypeStruct((m, p, n), dtype)
        for rows, p, _ in results
    ]
    slots = [] if index is None else [index.reshape(1)]
    blocks = [*(tiles.block(x.shape) for x in xs), *(((1,), (None,)) for _ in slots)]
    blocks += [tiles.block(shape, sums=True) for shape in results] + [tiles.block(x.shape) for x in xs[given:]]

    def kernel(*refs: Ref) -> None:
        ins, outs = refs[: len(xs) + len(slots)], refs[len(xs) + len(slots) :]
        slot = ins[-1][0] if slots else 0
        copies = dict(zip(copied, outs[len(results) :], strict=True))
        _compute_tiles(f, tiles, ins[:given], outs[: len(results)], slot, copies)

    updated = {given + i: len(results) + i for i in range(len(copied))}
    made += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs[given:]]
    found = run_tiles(MAP_PARTS_IN_SLOT if slots else MAP_PARTS, kernel, grid, [*xs, *slots], made, blocks, updated)
    sums = [
        y.sum(0, keepdims=True).astype(dtype) if shape[0] == 1 else y for y, shape in zip(found, results, strict=False)
    ]
    return [*sums, *found[len(results) :]]


def _compute_tiles(
    f: Callable, tiles: Tiles, ins: Sequence[Ref], outs: Sequence[Ref], slot: jax.Array | int, copies: dict[int, Ref]
) -> None:
    """Compute a program's tiles, and copy operands into a slot of buffers.

    Args:
      ins: the operands: [rows * steps, P, columns], [1, P, columns] or buffers [S, M, P, N].
      outs: the results alike, but no buffers.
      copies: by their numbers, the operands' buffers.
    """
    results = [(ref, p) for ref in outs for p in range(ref.shape[1])]
    biases = [each([ref]) if ref.shape[:-2] == (1,) else None for ref in ins]

    def tile(step: jax.Array | int, sums: Sequence[jax.Array]) -> list[jax.Array]:
        operands = [
            bias or [ref[tiles.place(ref, slot, step, p)].astype(jnp.float32) for p in range(ref.shape[-2])]
            for ref, bias in zip(ins, biases, strict=True)
        ]
        for i, ref in copies.items():
            for p, x in enumerate(operands[i]):
                ref[tiles.place(ref, slot, step, p)] = x.astype(ref.dtype)
        found = list(zip(results, f(*itertools.chain(*operands)), strict=True))
        for (ref, p), y in found:
            if ref.shape[0] > 1:
                ref[tiles.place(ref, slot, step, p)] = y.astype(ref.dtype)
        return [total + y for total, y in zip(sums, (y for (ref, _), y in found if ref.shape[0] == 1), strict=True)]

    places = [(ref, p) for ref, p in results if ref.shape[0] == 1]
    zeros = [jnp.zeros((1, tiles.columns), jnp.float32)] * len(places)
    sums = tile(0, zeros) if tiles.steps == 1 else lax.fori_loop(0, tiles.steps, tile, zeros)
    for (ref, p), total in zip(places, sums, strict=True):
        ref[:, p, :] = total


def run_tiles(
    name: str, kernel: Callable, grid: tuple[int, int], operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct], blocks: Sequence[Block], updated: dict[int, int] | None = None,
) -> list[jax.Array]:  # fmt: skip
    """Run a Triton kernel on the blocks of its operands and results, one program for each place of the grid.

    `updated` maps the operands that become results, by their numbers.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def spec(shape: tuple[int, ...], places: tuple[int | None, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i, j: tuple(0 if place is None else (i, j)[place] for place in places))

    specs = [spec(*block) for block in blocks]
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=specs[: len(operands)],
        out_specs=specs[len(operands) :],
        out_shape=list(results),
        input_output_aliases=updated or {},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name=name,
    )(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split_parts(y: jax.Array, sizes: tuple[int, ...], axis: int) -> list[jax.Array]:
    """Split an array as `lax.split` does. The backward pass writes the gradients one after another into one array.

    XLA's kernel of a concatenation reads and writes one number at a time: with RoPE's backward pass it took 161 us for
    the queries, keys and values of 8,192 tokens of Llama 8B, which is 1.25 TB/s, on an H200.
    """
    return list(lax.split(y, sizes, axis))


def _in_place(sizes: tuple[int, ...], axis: int, _: None, gradients: list[jax.Array]) -> tuple[jax.Array]:
    shape = list(gradients[0].shape)
    shape[axis] = sum(sizes)
    y = jnp.zeros(shape, gradients[0].dtype)
    for end, size, g in zip(itertools.accumulate(sizes), sizes, gradients, strict=True):
        y = lax.dynamic_update_slice_in_dim(y, g, end - size, axis)
    return (y,)


split_parts.defvjp(lambda y, sizes, axis: (list(lax.split(y, sizes, axis)), None), _in_place)


@jax.custom_vjp
def cut_with_rows(y: jax.Array, rows: jax.Array) -> list[jax.Array]:
    """Cut [M, P N] into P parts [M, N], and add one of the rows [P, N] to each.

    The backward pass joins the gradients and sums each over its rows in one pass. XLA takes one for each of them.
    """
    return _cut(y, rows)


def _cut(y: jax.Array, rows: jax.Array) -> list[jax.Array]:
    parts = y.reshape(len(y), *rows.shape)
    return [parts[:, i] + row for i, row in enumerate(rows)]


def _joined(_: None, gradients: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    def f(*parts: jax.Array) -> list[jax.Array]:
        return [*parts, *(x.sum(0, keepdims=True) for x in parts)]

    dy, sums = map_parts(f, [g[:, None] for g in gradients], [len(gradients)] * 2)
    return dy.reshape(len(dy), -1), sums[0]


cut_with_rows.defvjp(lambda y, rows: (_cut(y, rows), None), _joined)


# ------------------------------------------------------------------ and the products after it


# A product as one equation of a trace: of x [..., K] and the parts of a matrix without a gradient. Its parameter `make`
# makes the matrix, forward and backward: `make(*parts, operand) -> (operand, matrix [K, ...])`.
FROZEN = "frozen_dot_general"
Weight = jax.Array | Partial  # the latter: (operand, matrix [K, N]) = make(*parts, operand)


def mapped_dot_general(
    f: Elementwise, xs: Sequence[jax.Array], ws: Sequence[Weight], precision: Precision = None, keep: bool = False
) -> list[jax.Array]:
    """Compute `f(parts of xs) w` for xs [M, P, K], then rows [1, 1, K], and each weight [K, ...], as [M, N].

    The backward pass keeps xs, and computes `f` again where it computes the gradients of xs; or it keeps `f` too.
    """
    flat = tuple(w if isinstance(w, Partial) else w.reshape(w.shape[0], -1) for w in ws)
    return list(_products(f, precision, keep, tuple(xs), flat))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _products(
    f: Elementwise, precision: Precision, keep: bool, xs: tuple[jax.Array, ...], ws: tuple[Weight, ...]
) -> tuple[jax.Array, ...]:
    return _forward(f, precision, keep, xs, ws)[0]


def _forward(f: Elementwise, precision: Precision, keep: bool, xs: tuple, ws: tuple) -> tuple[tuple, tuple]:
    (x,) = map_parts(f, xs, [1])
    keep = keep and not all(isinstance(w, Partial) for w in ws)  # no gradient of a frozen weight reads it
    return tuple(lax.dot(*_made(x[:, 0], w), precision=precision) for w in ws), (xs, ws, x if keep else None)


def _made(operand: jax.Array, w: Weight) -> tuple[jax.Array, jax.Array]:
    """Return an operand, and the matrix [K, N] to multiply it with."""
    operand, w = w(operand) if isinstance(w, Partial) else (operand, w)
    return operand, w.reshape(len(w), -1)


def _backward(f: Elementwise, precision: Precision, keep: bool, kept: tuple, gs: tuple) -> tuple[tuple, tuple]:
    xs, ws, x = kept
    across = (((1,), (1,)), ((), ()))
    dx = reduce(
        jnp.add, (lax.dot_general(*_made(g, w), across, precision=precision) for g, w in zip(gs, ws, strict=True))
    )
    counts = [x.shape[1] for x in xs]
    pullback = Pullback(f, tuple(range(sum(counts))))

    # One pass over memory for the gradients of xs and for f(xs), which the gradients of ws need.
    def both(*parts: jax.Array) -> list[jax.Array]:
        return [*pullback(*parts), *f(*parts[:-1])]

    if x is not None or all(isinstance(w, Partial) for w in ws):
        dxs = map_parts(pullback, [*xs, dx[:, None]], counts)
    else:
        *dxs, x = map_parts(both, [*xs, dx[:, None]], [*counts, 1])
    down = (((0,), (0,)), ((), ()))

    def gradient(g: jax.Array, w: Weight) -> jax.Array | None:
        return None if isinstance(w, Partial) else lax.dot_general(x[:, 0], g, down, precision=precision)

    return tuple(dxs), tuple(map(gradient, gs, ws))


_products.defvjp(_forward, _backward)
