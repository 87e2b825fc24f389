"""A hash of 32-bit words, the same in NumPy and JAX."""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np

Words = TypeVar("Words", np.ndarray, jax.Array)


def hash32(x: Words) -> Words:
    """Mix the bits of uint32s by a bijection: the finalizer of MurmurHash3 (Appleby, 2011)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
