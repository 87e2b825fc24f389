"""Blockwise symmetric quantisation: signed integers of 8 or 4 bits, and one float32 scale for each block.

    scale = max |x| over the block / largest integer,   code = round(x / scale),   x ~ code * scale

The error of an element is at most half its block's scale. A block with a value that is not finite comes back without a
finite value, so overflow checks still see it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LARGEST = {8: 127, 4: 7}  # the largest code by its bits
# The smaller a block, the less its largest value hides the others; each costs 4 bytes. DeepSpeed's weights have blocks
# of 4,000 to 8,000 elements, its gradients of the smaller side of the matrix.
BLOCK = 64
# Below this size the scales would weigh more than the codes save.
SMALLEST_BLOCK = 16


def block_size(n: int) -> int:
    """Return the largest even divisor of n up to `BLOCK`; 0 if there is none from `SMALLEST_BLOCK` on.

    >>> block_size(1024), block_size(1000), block_size(33)
    (64, 50, 0)
    """
    return next((size for size in range(BLOCK, SMALLEST_BLOCK - 1, -2) if n % size == 0), 0)


def quantize(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Quantise along the last dimension.

    Args:
      x: floats [..., n], with `block_size(n)` > 0.
      bits: 8 or 4.

    Returns:
      The codes, int8 [..., n] or uint8 [..., n / 2]; the scales, float32 [..., n / block].

    >>> codes, scales = quantize(jnp.array([127.0, -63.4] + [0.0] * 14), 8)
    >>> codes[:3].tolist(), scales.tolist()
    ([127, -63, 0], [1.0])
    """
    size = block_size(x.shape[-1])
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    scales = jnp.abs(blocks).max(-1) / LARGEST[bits]
    divisors = jnp.where(scales == 0, 1, scales)[..., None]  # a block of zeros, also of numbers whose scale underflows
    codes = jnp.clip(jnp.round(blocks / divisors), -LARGEST[bits], LARGEST[bits])
    # Two codes of 4 bits in a byte: collectives of smaller types than a byte are not portable.
    if bits == 8:
        return codes.astype(jnp.int8).reshape(x.shape), scales
    low, high = jnp.split((codes + 8).astype(jnp.uint8), 2, axis=-1)
    return (low | high << 4).reshape(*x.shape[:-1], -1), scales


def dequantize(codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Invert `quantize`: float32 [..., n].

    >>> x = jnp.linspace(-7, 7, 16)
    >>> dequantize(*quantize(x, 4), 4)[:4].tolist()
    [-7.0, -6.0, -5.0, -4.0]
    """
    blocks = codes.reshape(*scales.shape, -1)
    if bits == 4:
        blocks = jnp.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int8) - 8
    x = blocks.astype(jnp.float32) * scales[..., None]
    return x.reshape(*x.shape[:-2], -1)
