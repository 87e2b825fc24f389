"""Casts of an elementwise function's results to fp8, in one pass over memory where there is a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compat import function_primitive
from jzero.fp8.quantized import amax, cast8
from jzero.fusion.elementwise import each
from jzero.fusion.parts import has_triton


def identity(*xs: jax.Array) -> list[jax.Array]:
    return list(xs)


def amax_of(f: Any, xs: Sequence[jax.Array]) -> jax.Array:
    """Return the largest absolute value of f's results, float32 []."""
    return amax(*f(*each(xs)))


def cast_pair(f: Any, xs: Sequence[jax.Array], scale: jax.Array, dtype: Any, with_amax: bool = False) -> Any:
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


def _plain(f: Any, dtype: Any, with_amax: bool, *operands: jax.Array) -> tuple[jax.Array, ...]:
    *xs, scale = operands
    x8 = jnp.concatenate([cast8(y, scale, dtype) for y in f(*each(xs))], axis=1)
    return (x8, x8.T, amax_of(f, xs)) if with_amax else (x8, x8.T)


def _kernel(operands: Any, results: Any, device: Any, f: Any) -> Any:
    """Choose a kernel; None: XLA's program."""
    from jzero.fp8 import triton

    *xs, _ = operands
    if not has_triton(device) or not triton.supports([x.shape for x in xs], results[0].shape):
        return None
    return partial(triton.cast_pair, f, dtype=results[0].dtype, with_amax=len(results) == 3)


_primitive = function_primitive("fp8_cast_pair", _kernel)
