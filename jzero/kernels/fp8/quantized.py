"""An array in fp8 with one scale (per-tensor scaling; Micikevicius et al., 2022, arXiv:2209.05433).

Scales are powers of two: the products by them are exact, so the only error is the rounding to fp8, and two devices that
scale parts of an array differently agree on all but the smallest elements. The current maximum decides the scale, or
with the recipe "delayed" the maxima of former steps (`jzero.kernels.fp8.delayed_scaling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
GRADIENTS = {"hybrid": E5M2, "e4m3": E4M3}  # `fp8.format` -> the dtype of gradients; weights and activations are e4m3

# Of a scale, so that it and its inverse are normal numbers in bfloat16 and float32.
_LEAST, _MOST = -100, 100
BIAS, _MANTISSA = 127, 23  # of float32: what is added to exponents, and the bits after them


class Delayed(NamedTuple):
    """Scales that former steps decided, see `jzero.kernels.fp8.delayed_scaling`.

    Attributes:
      scales: float32 [2], of the activations that a weight is multiplied with, and of the gradients of the product.
      weight: float32 [], the largest element of this device's part of the weight; None where it is used.
      seen: zeros, whose "gradient" tells how large both were this time; None where it is not used.
    """

    scales: jax.Array
    weight: jax.Array | None = None
    seen: jax.Array | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x8", "scale", "place", "delayed"],
    meta_fields=["dtype", "gradients"],
)
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
      delayed: the scales of the activations and gradients that it is multiplied with; None: their own maxima decide.
    """

    x8: jax.Array
    scale: jax.Array
    place: jax.Array | None
    dtype: jnp.dtype
    gradients: jnp.dtype
    delayed: Delayed | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x8.shape

    def dequantized(self) -> jax.Array:
        """Return the rounded weight in `dtype`, for what is no product."""
        x = lax.stop_gradient(self.x8.astype(self.dtype) * (1 / self.scale).astype(self.dtype))
        return x if self.place is None else x + self.place

    def used(self, x8: jax.Array, place: jax.Array | None, seen: jax.Array | None = None) -> Quantized:
        """Return the weight as the model uses it, made from what this device keeps of it."""
        delayed = self.delayed and self.delayed._replace(weight=None, seen=seen)
        return replace(self, x8=x8, place=place, delayed=delayed)


def quantize_weight(
    x: jax.Array, axes: Sequence[str], dtype: DTypeLike, gradients: DTypeLike, known: jax.Array | None = None
) -> Quantized:
    """Cast a shard of a weight to fp8, by a scale that the devices along `axes` agree on.

    Args:
      known: the scales that former steps decided, float32 [3]: of the activations that the weight is multiplied with,
        of the gradients of the product and of the weight; None: the largest element decides.
    """
    if known is None:
        largest, delayed = amax(x), None
        scale = scale_of(lax.pmax(largest, tuple(axes)) if axes else largest, E4M3)
        x8 = cast8(x, scale, E4M3)
    else:
        # Both read x times the scale, and nothing uses one before the other: XLA makes one kernel of them.
        scale, scaled = known[2], x.astype(jnp.float32) * known[2]
        x8, largest = lax.optimization_barrier((cast8(scaled, jnp.float32(1), E4M3), amax(scaled) / scale))
        delayed = Delayed(known[:2], largest)
    scale = finite_or_nan(scale, largest)  # the group's maximum may have dropped a NaN
    return Quantized(x8, scale, None, jnp.dtype(dtype), jnp.dtype(gradients), delayed)


def amax(*xs: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Return the largest absolute value in arrays of one shape, float32 [], or along axes; NaN if one is NaN.

    As integers the bits of nonnegative numbers have the same order, with infinity and NaN above all. XLA's maximum of
    floating-point numbers drops NaN on GPUs (`xla_gpu_enable_fast_min_max`), as Triton's does.
    """
    bits = (lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32) for x in xs)
    return lax.bitcast_convert_type(jnp.max(reduce(jnp.maximum, bits), axis), jnp.float32)


def scale_of(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the largest power of two that keeps `largest` in the range of an fp8 dtype; NaN if it is not finite.

    >>> float(scale_of(jnp.float32(7.0), E4M3))
    64.0
    """
    exponent = exponent_of(float(jnp.finfo(dtype).max) / largest.astype(jnp.float32))
    return finite_or_nan(power_of_two(jnp.clip(exponent, _LEAST + BIAS, _MOST + BIAS)), largest)


def finite_or_nan(scale: jax.Array, largest: jax.Array) -> jax.Array:
    """Return the scale; NaN if the largest element is not finite, so that the step sees it: see `cast8`."""
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def exponent_of(x: jax.Array) -> jax.Array:
    """Return the exponent of nonnegative float32 numbers as it is stored: with `BIAS`, 0 for the smallest numbers."""
    return lax.bitcast_convert_type(x, jnp.int32) >> _MANTISSA


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Make a float32 number of a stored exponent."""
    return lax.bitcast_convert_type(exponent << _MANTISSA, jnp.float32)


def cast8(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round `x * scale` to an fp8 dtype. Clipped, what is not finite may look like any other number."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)
