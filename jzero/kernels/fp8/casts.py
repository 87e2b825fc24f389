"""Casts of an elementwise function's results to fp8, in one pass over memory where there is a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jzero._compat import function_primitive
from jzero.kernels.fp8.quantized import amax, cast8
from jzero.kernels.fusion.elementwise import each
from jzero.kernels.fusion.parts import Block, Device, Ref, Shapes, fit, has_triton, run_tiles


def identity(*xs: jax.Array) -> list[jax.Array]:
    return list(xs)


def amax_of(f: Callable, xs: Sequence[jax.Array]) -> jax.Array:
    """Return the largest absolute value of f's results, float32 []."""
    return amax(*f(*each(xs)))


def cast_pair(
    f: Callable, xs: Sequence[jax.Array], scale: jax.Array, dtype: DTypeLike, with_amax: bool = False
) -> tuple[jax.Array, ...]:
    """Round `f(*xs) * scale` to an fp8 dtype; return it and its transpose.

    Args:
      f: takes one array for each part of each operand, and returns Q.
      xs: [M, P, N], each of P parts.
      scale: float32 [].
      with_amax: return the largest absolute value of f's results too.

    Returns:
      [M, Q N], [Q N, M], and float32 [] `with_amax`.
    """
    jaxpr = jax.make_jaxpr(partial(_plain, f, dtype, with_amax))(*xs, scale)
    return tuple(_primitive.bind(*xs, scale, jaxpr=jaxpr, f=f))


def _plain(f: Callable, dtype: DTypeLike, with_amax: bool, *operands: jax.Array) -> tuple[jax.Array, ...]:
    *xs, scale = operands
    x8 = jnp.concatenate([cast8(y, scale, dtype) for y in f(*each(xs))], axis=1)
    return (x8, x8.T, amax_of(f, xs)) if with_amax else (x8, x8.T)


def _kernel(operands: Shapes, results: Shapes, device: Device, f: Callable) -> Callable | None:
    """Choose a kernel; None: XLA's program."""
    *xs, _ = operands
    if not has_triton(device) or not supports_cast([x.shape for x in xs], results[0].shape):
        return None
    return partial(tiled_cast_pair, f, dtype=results[0].dtype, with_amax=len(results) == 3)


_primitive = function_primitive("fp8_cast_pair", _kernel)

# ------------------------------------------------------------------ as a Triton kernel (Pallas)

# Of a tile. Measured on an H200 from 32x128 to 256x64: 2.8 to 3.4 TB/s; this one was among the fastest for every shape.
ROWS, COLUMNS = 32, 128


def supports_cast(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> bool:
    """Return whether the kernel takes arrays [m, p, n], and returns [m, q n]."""
    m, _, n = shapes[0]
    return fit([*shapes, (m, out[1] // n, n)], ROWS, COLUMNS)


def tiled_cast_pair(f: Callable, *operands: jax.Array, dtype: DTypeLike, with_amax: bool) -> tuple[jax.Array, ...]:
    """Compute `cast_pair`: write each tile of the results, and its transpose, and its largest element."""
    *xs, scale = operands
    (m, _, n), read = xs[0].shape, sum(x.shape[1] for x in xs)
    made = len(jax.eval_shape(f, *[jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)] * read))

    def kernel(*refs: Ref) -> None:
        (*x_refs, scale_ref), (out_ref, transposed_ref, *amax_refs) = refs[: len(operands)], refs[len(operands) :]
        ys = f(*each(x_refs))
        for q, y in enumerate(ys):
            y8 = cast8(y, scale_ref[0], dtype)
            out_ref[:, q, :] = y8
            transposed_ref[q, :, :] = y8.T
        for ref in amax_refs:
            ref[0, 0] = amax(*ys)

    grid = m // ROWS, n // COLUMNS
    results = [((m, made, n), dtype), ((made, n, m), dtype), *[(grid, jnp.float32)] * with_amax]
    blocks: list[Block] = [((ROWS, x.shape[1], COLUMNS), (0, None, 1)) for x in xs]
    blocks += [((1,), (None,)), ((ROWS, made, COLUMNS), (0, None, 1)), ((made, COLUMNS, ROWS), (None, 1, 0))]
    blocks += [((1, 1), (0, 1))] * with_amax
    shapes = [jax.ShapeDtypeStruct(*result) for result in results]
    found = run_tiles("fp8_cast_pair", kernel, grid, [*xs, scale.reshape(1)], shapes, blocks)
    return found[0].reshape(m, -1), found[1].reshape(-1, m), *map(amax, found[2:])
