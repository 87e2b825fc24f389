"""The matrix product of a mixture of experts: each group of rows times its own expert's matrix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WEIGHT_GRADIENT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@jax.custom_vjp
def grouped_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply consecutive groups of rows by one matrix each.

    Args:
        x: rows [T, D], sorted by group. Rows after the last group are padding; their values do not matter.
        w: one matrix per group [E, D, F], in the dtype of `x`.
        sizes: rows of each group [E], int32; their sum is at most T, and any of them may be 0.

    Returns:
        [T, F] in the dtype of `x`, summed in float32; zero in padding rows. Both gradients are grouped products, too.
    """
    return _forward(x, w, sizes)[0]


def _forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    out = lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
    return out.astype(x.dtype), (x, w, sizes)


def _backward(residuals: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray]:
    x, w, sizes = residuals
    dx = lax.ragged_dot(dy, w.swapaxes(1, 2), sizes, preferred_element_type=jnp.float32)
    dw = lax.ragged_dot_general(x, dy, sizes, _WEIGHT_GRADIENT, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype), np.zeros(sizes.shape, jax.dtypes.float0)


grouped_dot.defvjp(_forward, _backward)
