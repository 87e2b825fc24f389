"""An array in fp8 with one scale (per-tensor scaling; Micikevicius et al., 2022, arXiv:2209.05433).

Scales are powers of two: the products by them are exact, so the only error is the rounding to fp8, and two devices that
scale parts of an array differently agree on all but the smallest elements. The current maximum decides the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
GRADIENTS = {"hybrid": E5M2, "e4m3": E4M3}  # `fp8.format` -> the dtype of gradients; weights and activations are e4m3

# Of a scale, so that it and its inverse are normal numbers in bfloat16 and float32.
_LEAST, _MOST = -100, 100
_BIAS, _MANTISSA = 127, 23  # of float32


@partial(jax.tree_util.register_dataclass, data_fields=["x8", "scale", "place"], meta_fields=["dtype", "gradients"])
@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight in fp8, or this device's shard of one.

    Attributes:
      x8: e4m3, the weight times `scale`.
      scale: float32 [], a power of two.
      place: zeros in the weight's shape, to which its gradient flows: of an fp8 array JAX would make an fp8 gradient.
        None: it has no gradient.
      dtype: in which the model sees it.
      gradients: the fp8 dtype of the gradients in its backward products.
    """

    x8: jax.Array
    scale: jax.Array
    place: jax.Array | None
    dtype: Any
    gradients: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x8.shape

    def dequantized(self) -> jax.Array:
        """Return the rounded weight in `dtype`, for what is no product."""
        x = lax.stop_gradient(self.x8.astype(self.dtype) * (1 / self.scale).astype(self.dtype))
        return x if self.place is None else x + self.place

    def with_place(self, x8: jax.Array, place: jax.Array | None) -> Quantized:
        """Return the weight as the model uses it, made from what this device keeps of it."""
        return replace(self, x8=x8, place=place)


def quantize_weight(x: jax.Array, axes: Sequence[str], dtype: Any, gradients: Any) -> Quantized:
    """Cast a shard of a weight to fp8, by a scale that the devices along `axes` agree on."""
    largest = amax(x)
    scale = scale_of(lax.pmax(largest, tuple(axes)) if axes else largest, E4M3)
    return Quantized(cast8(x, scale, E4M3), scale, None, jnp.dtype(dtype), jnp.dtype(gradients))


def amax(x: jax.Array) -> jax.Array:
    """Return the largest absolute value, float32 []."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """Return the largest power of two that keeps `largest` in the range of an fp8 dtype; NaN if it is not finite.

    >>> float(scale_of(jnp.float32(7.0), E4M3))
    64.0
    """
    ratio = float(jnp.finfo(dtype).max) / largest
    exponent = (lax.bitcast_convert_type(ratio, jnp.int32) >> _MANTISSA) - _BIAS
    bits = (jnp.clip(exponent, _LEAST, _MOST) + _BIAS) << _MANTISSA
    # A saturated infinity would look like any other number; so the step must see NaN.
    return jnp.where(jnp.isfinite(largest), lax.bitcast_convert_type(bits, jnp.float32), jnp.nan)


def cast8(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Round `x * scale` to an fp8 dtype."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)
