"""A checksum of every leaf that is the same for every layout, computed on the devices or from parts of a leaf by NumPy.

The checksum is a sum of hashes modulo 2**32, one per element, of the element's bits and its index in the global array.
Integer addition is exact and commutative, so any partition of the array gives the same sum. Hashing the index detects
elements that changed places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero._compat import as_device_array, is_host_array, memory_view
from jzero.values.hash32 import hash32

BLOCK = 2**20  # elements that NumPy hashes at a time, so that the temporaries stay small


def is_key(x: Any) -> bool:
    """Return whether `x` is an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_data(x: Any) -> jax.Array:
    """Return the uint32 data of random keys, as a checkpoint stores them; return other arrays unchanged."""
    return jax.random.key_data(x) if is_key(x) else x


@jax.jit
def checksums(leaves: dict[str, jax.Array]) -> jax.Array:
    """Compute the checksums of leaves with any sharding: uint32 [number of leaves], in the order of the sorted names.

    >>> x = jnp.arange(8.0)
    >>> a, b = checksums({"a": x, "b": x.at[5].set(5.5)})
    >>> bool(a == b), int(a) == int(checksums({"a": x[None]})[0])
    (False, True)
    """
    return jnp.stack([_of_leaf(key_data(leaves[name])) for name in sorted(leaves)])


def _of_leaf(x: jax.Array) -> jax.Array:
    if not is_host_array(x):
        return _checksum(x)
    # The kernels read host memory themselves. XLA for GPUs then takes the sum for an array of host memory too, and
    # refuses to return it from the program as one of the device's: so it is called one, and copied.
    space = jax.memory.Space
    return jax.device_put(memory_view(_checksum(as_device_array(x)), space.Host), space.Device)


def part_of_checksum(values: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """Compute with NumPy what a part of a leaf adds to the leaf's checksum, modulo 2**32.

    Args:
      values: the part.
      start: the index of its first element in the leaf.
      shape: of the leaf.

    >>> x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    >>> parts = part_of_checksum(x[:, :2], (0, 0), x.shape) + part_of_checksum(x[:, 2:], (0, 2), x.shape)
    >>> parts % 2**32 == int(checksums({"x": jnp.asarray(x)})[0])
    True
    """
    if values.size <= BLOCK:
        return int(_checksum(values, start, shape))
    dim = int(np.argmax(values.shape))
    first, second = np.array_split(values, 2, axis=dim)
    after = [*start[:dim], start[dim] + first.shape[dim], *start[dim + 1 :]]
    return part_of_checksum(first, start, shape) + part_of_checksum(second, after, shape)


def _checksum(x: Any, start: Sequence[int] = (), shape: Sequence[int] = ()) -> Any:
    """Sum the hashes of a leaf, or of its part at `start`, in JAX or NumPy as the array is."""
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    to = np.dtype(f"u{min(x.dtype.itemsize, 4)}")  # elements of eight bytes are two words, in a last dimension
    if xp is np:
        words: Any = np.ascontiguousarray(x[..., None]).view(to)
    else:
        words = x.astype(to) if x.dtype == bool else lax.bitcast_convert_type(x, to)
    start, shape = ([*some, *rest[len(some) :]] for some, rest in ((start, [0] * words.ndim), (shape, words.shape)))
    # The flat index of every word, as a sum over dimensions: a reshape could move shards between devices.
    index, stride = xp.zeros(words.shape, np.uint32), 1
    for dim in reversed(range(words.ndim)):
        steps = (xp.arange(words.shape[dim], dtype=np.uint32) + np.uint32(start[dim] % 2**32)) * np.uint32(
            stride % 2**32
        )
        index += steps.reshape([-1 if d == dim else 1 for d in range(words.ndim)])
        stride *= shape[dim]
    return hash32(words.astype(np.uint32) ^ hash32(index)).sum(dtype=np.uint32)
