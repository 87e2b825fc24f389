"""A cast to fp8 and its transposed copy, in one pass over memory where there is a kernel for it.

XLA's own fusion of the two ran at 0.9 to 1.9 TB/s on an H200, the kernel of `jzero.fp8.triton` at 2.9 to 3.4
(experiments/benchmarks/2026-11-26-fp8-h200.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jzero._compat import function_primitive
from jzero.fp8.quantized import cast8


def cast_pair(x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round `x * scale` [M, N] to an fp8 dtype; return it and its transpose [N, M]."""
    jaxpr = jax.make_jaxpr(partial(_plain, dtype=dtype))(x, scale)
    return tuple(_primitive.bind(x, scale, jaxpr=jaxpr))  # type: ignore[return-value]


def _plain(x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return cast8(x, scale, dtype), cast8(x.T, scale, dtype)


def _kernel(operands: Any, results: Any, device: Any) -> Callable | None:
    """Choose a kernel for an NVIDIA GPU; None: XLA's program."""
    from jzero.fp8 import triton

    x, _ = operands
    if device.platform != "gpu" or not triton.supports(x.shape, x.dtype):
        return None
    return partial(triton.cast_pair, dtype=results[0].dtype)


_primitive = function_primitive("fp8_cast_pair", _kernel)
