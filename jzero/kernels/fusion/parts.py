"""Elementwise functions of the parts of arrays, in one pass over memory where there is a kernel; and their products."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jzero._compat import function_primitive
from jzero.kernels.fusion.elementwise import Elementwise, Pullback, each

Precision = lax.PrecisionLike
Ref = Any  # an array in a kernel of Pallas
Shapes = Sequence[jax.core.ShapedArray]
_BEFORE_AMPERE = re.compile(r"\b(T4|[PV]100|TITAN|GTX|RTX 20\d\d|RTX [3-8]000)\b")


def map_parts(f: Callable, xs: Sequence[jax.Array], parts: Sequence[int]) -> list[jax.Array]:
    """Compute an elementwise function of all parts of some arrays.

    Args:
      f: takes one float32 array for each part of each operand, and returns one for each part of each result.
      xs: [M, P, N], of one dtype.
      parts: how many parts each result has.

    Returns:
      [M, Q, N] for each Q of `parts`, in the dtype of xs.
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
    if not has_triton(device) or not supports_elementwise([x.shape for x in (*operands, *results)]):
        return None
    return partial(tiled_map_parts, f, parts=[y.shape[1] for y in results])


_primitive = function_primitive("map_parts", _kernel)

# ------------------------------------------------------------------ as a Triton kernel (Pallas)

TILE, COLUMNS = 1024, 512  # elements of a part, at most as many columns
Block = tuple[tuple[int, ...], tuple[int | None, ...]]  # shape; which index of the grid counts it, along each dimension


def supports_elementwise(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the kernel takes and returns arrays [m, p, n]."""
    rows, columns = _tile(shapes[0][2])
    return columns >= 128 and fit(shapes, rows, columns)


def fit(shapes: Sequence[tuple[int, ...]], rows: int, columns: int) -> bool:
    """Return whether a Triton kernel can cut arrays [m, p, n] into tiles [rows, p, columns]."""
    (m, _, n), parts = shapes[0], [p for _, p, _ in shapes]
    fits = m % rows == 0 and n % columns == 0 and m * n * max(parts) < 2**31
    return fits and all(p & (p - 1) == 0 for p in parts)  # the sizes of Triton's blocks are powers of two


def _tile(n: int) -> tuple[int, int]:
    columns = min(n & -n, COLUMNS)  # a power of two that divides n
    return TILE // columns, columns


def tiled_map_parts(f: Callable, *xs: jax.Array, parts: Sequence[int]) -> list[jax.Array]:
    """Compute `map_parts` tile by tile."""
    m, _, n = xs[0].shape
    rows, columns = _tile(n)

    def kernel(*refs: Ref) -> None:
        found = iter(f(*each(refs[: len(xs)])))
        for ref, count in zip(refs[len(xs) :], parts, strict=True):
            for p, y in enumerate(itertools.islice(found, count)):
                ref[:, p, :] = y.astype(ref.dtype)

    results = [jax.ShapeDtypeStruct((m, p, n), xs[0].dtype) for p in parts]
    blocks: list[Block] = [((rows, p, columns), (0, None, 1)) for p in (*(x.shape[1] for x in xs), *parts)]
    return run_tiles("map_parts", kernel, (m // rows, n // columns), xs, results, blocks)


def run_tiles(
    name: str, kernel: Callable, grid: tuple[int, int], operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct], blocks: Sequence[Block],
) -> list[jax.Array]:  # fmt: skip
    """Run a Triton kernel on the blocks of its operands and results, one program for each place of the grid."""
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
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name=name,
    )(*operands)


# ------------------------------------------------------------------ and the product after it


def mapped_dot_general(f: Elementwise, xs: Sequence[jax.Array], w: jax.Array, precision: Precision = None) -> jax.Array:
    """Compute `f(parts of xs) w` for xs [M, P, K] and a weight [K, ...], as [M, ...].

    The backward pass keeps xs alone, and computes `f` again where it computes the gradients of xs.
    """
    y = _product(f, precision, tuple(xs), w.reshape(w.shape[0], -1))
    return y.reshape(-1, *w.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(f: Elementwise, precision: Precision, xs: tuple[jax.Array, ...], w: jax.Array) -> jax.Array:
    (x,) = map_parts(f, xs, [1])
    return lax.dot(x[:, 0], w, precision=precision)


def _forward(f: Elementwise, precision: Precision, xs: tuple, w: jax.Array) -> tuple[jax.Array, tuple]:
    return _product(f, precision, xs, w), (xs, w)


def _backward(f: Elementwise, precision: Precision, kept: tuple, g: jax.Array) -> tuple[tuple, jax.Array]:
    xs, w = kept
    dx = lax.dot_general(g, w, (((1,), (1,)), ((), ())), precision=precision)
    counts = [x.shape[1] for x in xs]
    pullback = Pullback(f, tuple(range(sum(counts))))

    def both(*parts: jax.Array) -> list[jax.Array]:
        return [*pullback(*parts), *f(*parts[:-1])]

    *dxs, x = map_parts(both, [*xs, dx[:, None]], [*counts, 1])
    return tuple(dxs), lax.dot_general(x[:, 0], g, (((0,), (0,)), ((), ())), precision=precision)


_product.defvjp(_forward, _backward)
