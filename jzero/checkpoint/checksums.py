"""A checksum of every leaf that is the same for every layout, computed on the devices or from parts of a leaf by NumPy.

The checksum is a sum of hashes modulo 2**32, one per element, of the element's bits and its index in the global array.
Integer addition is exact and commutative, so any partition of the array gives the same sum. Hashing the index detects
elements that changed places.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero._compat import as_device_array, is_host_array, memory_view
from jzero.checkpoint.leaves import key_data
from jzero.values.hash32 import hash32

BLOCK = 2**20  # elements that NumPy hashes at a time, so that the temporaries stay small


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


def _checksum(x: jax.Array) -> jax.Array:
    size = x.dtype.itemsize
    if x.dtype == bool:
        bits = x.astype(jnp.uint32)
    elif size < 4:
        bits = lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[size]).astype(jnp.uint32)
    else:
        bits = lax.bitcast_convert_type(x, jnp.uint32)  # an element of eight bytes gives two words
    # The flat index of every word, as a sum of iotas: a reshape could move shards between devices.
    index, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for dim in reversed(range(bits.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[dim]
    return jnp.sum(hash32(bits ^ hash32(index)), dtype=jnp.uint32)


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
    if values.ndim > 1 and values.size > BLOCK:
        middle = max(range(values.ndim), key=lambda d: values.shape[d])
        half = values.shape[middle] // 2
        first, second = np.split(values, [half], axis=middle)
        after = [*start[:middle], start[middle] + half, *start[middle + 1 :]]
        return part_of_checksum(first, start, shape) + part_of_checksum(second, after, shape)
    bits = np.ascontiguousarray(values).reshape(-1)
    if values.dtype == bool:
        bits = bits.astype(np.uint32)
    elif values.itemsize < 4:
        bits = bits.view({1: np.uint8, 2: np.uint16}[values.itemsize]).astype(np.uint32)
    else:
        bits = bits.view(np.uint32)
    words, index, stride = max(1, values.itemsize // 4), np.zeros(values.shape, np.uint32), 1
    for dim in reversed(range(values.ndim)):
        steps = (np.arange(start[dim], start[dim] + values.shape[dim], dtype=np.uint64) * stride * words) % 2**32
        index += steps.astype(np.uint32).reshape([-1 if d == dim else 1 for d in range(values.ndim)])
        stride *= shape[dim]
    word_index = (index.reshape(-1, 1) + np.arange(words, dtype=np.uint32)).reshape(-1)
    return int(hash32(bits ^ hash32(word_index)).sum(dtype=np.uint64))
