"""Moments in fp8: e5m2 times one power of two for each array of a layer.

Moments, second moments above all, span many powers of two: e5m2 has 32, with four numbers in each but the lowest two.
A change far below the distance of two numbers is not lost, because they are rounded at random. Nothing but 0 becomes
0, since an update divides by the root of a second moment.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from jzero.fp8.quantized import BIAS, amax, exponent_of, finite_or_nan, power_of_two
from jzero.optimizers.rounding import keep_bits

DTYPE = jnp.float8_e5m2
LEAST = 2**16  # elements of a layer's array; smaller ones, norms and biases, stay as they are
_LARGEST = 14  # exponent of an array's largest code, which may be rounded up; e5m2 goes on to 15
_NORMAL, _SUBNORMAL = np.float32(2.0**-14), np.float32(2.0**-16)  # the smallest of each in e5m2
_HALF = np.uint32(2**31)


def is_large(x: jax.Array, layered: bool) -> bool:
    """Return whether a moment is worth rounding; `layered`: its first axis is the layer axis."""
    return jnp.issubdtype(x.dtype, jnp.floating) and prod(x.shape[1 if layered else 0 :]) >= LEAST


def encode(x: jax.Array, layered: bool, words: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Round a moment to fp8.

    Args:
      x: of any floating dtype.
      layered: the first axis of `x` is the layer axis; each layer then has a scale of its own.
      words: random uint32s, see `rounding.noise`; None: round to the nearest number.

    Returns:
      The codes, float8_e5m2 with the shape of `x`, and the scale, float32 [] or [layers]: NaN if an element is not
      finite.

    >>> codes, scale = encode(jnp.array([0.0, -1.0, 1.2e-4, 1e-12]), False)
    >>> codes.tolist(), float(scale) * 2**14
    ([0.0, -16384.0, 2.0, 1.52587890625e-05], 1.0)
    >>> [f"{x:.2g}" for x in decode(codes, scale).tolist()]
    ['0', '-1', '0.00012', '9.3e-10']
    """
    x = x.astype(jnp.float32)
    largest = amax(x, axis=tuple(range(int(layered), x.ndim)))
    exponent = exponent_of(largest) - BIAS
    exponent = jnp.maximum(exponent, -100) - _LARGEST  # so that the inverse is a normal number
    size = jnp.abs(x * _over(_power_of_two(-exponent), x))
    # subnormal numbers have the distances of those in the first power of two above them
    lift = jnp.where(size < _NORMAL, _NORMAL, 0)
    size = keep_bits(size + lift, _HALF if words is None else words, 2) - lift
    size = jnp.where(x == 0, 0, jnp.maximum(size, _SUBNORMAL))
    # A saturated infinity would look like any other number, and the bits of a NaN may be rounded to one.
    return _to_e5m2(jnp.copysign(size, x)), finite_or_nan(_power_of_two(exponent), largest)


def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the float32 numbers that codes stand for; the arguments are what `encode` returns."""
    return codes.astype(jnp.float32) * _over(scale, codes)


def _to_e5m2(x: jax.Array) -> jax.Array:
    """Cast numbers that e5m2 has; it is the upper half of float16. XLA's cast takes more instructions."""
    upper = jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16) >> np.uint16(8)
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint8), DTYPE)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return power_of_two(exponent + BIAS)


def _over(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Give a scale the axes of the array that it belongs to."""
    return scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
