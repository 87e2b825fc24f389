"""The matrix product of a mixture of experts: each group of rows times its own expert's matrix."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero._compat.kernels import lower_grouped_products
from jzero.kernels.fusion.parts import Device, Shapes, has_triton

Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# What `lax.ragged_dot_general` multiplies, by its dimension numbers: rows by matrices, rows by transposed matrices
# (the gradient of the rows), and transposed rows by rows (the gradient of the matrices).
_SUMMED = {((1,), (1,), (0,)): "rows", ((1,), (2,), (0,)): "transposed", ((0,), (0,), ()): "matrices"}
_DEFAULT = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT, lax.Precision.DEFAULT))
_HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")


def grouped_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply consecutive groups of rows by one matrix each.

    This is `jax.lax.ragged_dot` with kernels for NVIDIA GPUs: XLA's own program multiplies every row by every matrix,
    E times the FLOPs (jax 0.10 and 0.11). The call makes all `ragged_dot`s of the process use these kernels. On Hopper,
    Mosaic's takes bfloat16 and float16 with T divisible by 8, D and F by 64. Triton's takes the rest from Ampere on,
    float32 included, in the precision of other products (TF32 by default). Other devices run XLA's program.

    Args:
        x: rows [T, D], sorted by group. Rows after the last group are padding; their values do not matter.
        w: one matrix per group [E, D, F], in the dtype of `x`.
        sizes: rows of each group [E], int32; their sum is at most T, and any of them may be 0.

    Returns:
        [T, F] in the dtype of `x`, summed in float32; zero in padding rows. Derivatives are JAX's; both gradients are
        grouped products, too.

    Raises:
        TypeError: shapes that do not fit, or different dtypes.

    >>> x, w = jnp.ones((5, 2)), jnp.array([[[1.0], [1.0]], [[3.0], [4.0]]])
    >>> grouped_dot(x, w, jnp.array([3, 1], jnp.int32)).ravel().tolist()
    [2.0, 2.0, 2.0, 7.0, 0.0]
    """
    if x.dtype != w.dtype:
        raise TypeError(f"grouped_dot of {x.dtype} rows and {w.dtype} matrices: both need the same dtype")
    lower_grouped_products(choose_kernel)
    return lax.ragged_dot(x, w, sizes)


def choose_kernel(avals: Shapes, out: jax.core.ShapedArray, params: dict[str, Any], device: Device) -> Kernel | None:
    """Choose the kernel of a `ragged_dot_general`; None: XLA's program.

    Args:
        avals: shapes and dtypes of the operands.
        out: shape and dtype of the result.
        params: of the operation.
        device: what runs the program: a device, or a mesh's description of its devices.
    """
    x, w, _ = avals
    numbers = params["ragged_dot_dimension_numbers"]
    (summed, batch), ragged = numbers.dot_dimension_numbers, tuple(numbers.lhs_ragged_dimensions)
    what = _SUMMED.get((tuple(summed[0]), tuple(summed[1]), tuple(numbers.rhs_group_dimensions)))
    plain = x.ndim == 2 and not batch[0] and ragged == (0,) and params.get("group_offset") is None
    if (
        device.platform != "gpu"
        or what is None
        or not plain
        or x.dtype != w.dtype
        or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16)
    ):
        return None
    if _HOPPER.search(device.device_kind) and out.dtype == x.dtype != jnp.float32:
        from jzero.kernels import grouped_hopper

        if grouped_hopper.supports(x.shape[0], x.shape[1], *(w.shape[1:])):
            # An H100 with SXM has 132, where a description of devices does not tell.
            cores: Any = getattr(device, "num_cores", None) or getattr(device, "core_count", 132)
            if what == "matrices":
                return functools.partial(grouped_hopper.grouped_transposed, cores=cores)
            return functools.partial(grouped_hopper.grouped, transposed=what == "transposed", cores=cores)
    # Triton multiplies float32 as TF32, so a request for more is XLA's; and its offsets have 32 bits.
    exact = x.dtype == jnp.float32 and params["precision"] not in _DEFAULT
    if exact or not has_triton(device) or max(x.size, w.size, out.size) >= 2**31:
        return None
    from jzero.kernels import grouped_triton

    if what == "matrices":
        return functools.partial(grouped_triton.grouped_transposed, dtype=out.dtype)
    return functools.partial(grouped_triton.grouped, transposed=what == "transposed", dtype=out.dtype)
