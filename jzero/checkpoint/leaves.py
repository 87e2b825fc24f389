"""A state as named arrays: how it is stored, and a checksum of every leaf that does not depend on its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Named leaves as nested dicts, which is how Orbax stores them."""
    return unflatten_dict(dict(leaves), sep="/")


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_names(leaves: Mapping[str, Any]) -> dict[str, str]:
    """name -> implementation of the random keys, which are stored as the numbers that they are made of."""
    return {name: str(jax.random.key_impl(x)) for name, x in leaves.items() if is_key(x)}


def _bare(x: Any) -> jax.Array:
    return jax.random.key_data(x) if is_key(x) else x


def _copy(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.copy(_bare(x)) for name, x in leaves.items()}


def spread(x: jax.Array) -> Any:
    """The sharding of a leaf's copy: over the mesh axes on which the leaf is replicated too, if one dimension allows.

    Then every device has a part of its own to give to the host, and every process a part to write.
    """
    if is_key(x) or not isinstance(x.sharding, NamedSharding):
        return None
    mesh, spec = x.sharding.mesh, [*x.sharding.spec] + [None] * (x.ndim - len(x.sharding.spec))
    axes = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    more = tuple(name for name, n in mesh.shape.items() if n > 1 and not any(name in part for part in axes))
    for dim, size in enumerate(x.shape):
        if size and size % prod(mesh.shape[name] for name in axes[dim] + more) == 0:
            axes[dim] += more
            return NamedSharding(mesh, PartitionSpec(*axes))
    return x.sharding


def has_room(leaves: Mapping[str, jax.Array]) -> bool:
    """Whether this process's devices have room for the copies besides what the steps need.

    That is known from the steps so far; if there was none yet, the answer is no. On CPUs it is yes.
    """
    size = 0
    for x in leaves.values():
        size += prod(to.shard_shape(x.shape)) * x.dtype.itemsize if (to := spread(x)) else 0
    devices: Any = next(iter(leaves.values())).sharding.addressable_devices
    for device in devices:
        if stats := device.memory_stats():
            peak = stats["peak_bytes_in_use"]
            if peak < 1.2 * size or peak + size > 0.98 * stats["bytes_limit"]:
                return False
    return True


def snapshot(leaves: Mapping[str, jax.Array], room: bool) -> tuple[dict[str, jax.Array], jax.Array]:
    """(the leaves as they are now, in memory of their own; their checksums). The caller waits for no device.

    With room the copies are on the devices, which takes a hundredth of the time to the host (an H200: 0.9 milliseconds
    per GiB). Else they are on the way to the host, and the step that takes the leaves' buffers waits for that.
    """
    leaves = dict(leaves)
    sums = checksums(leaves)
    if not room:
        keys = {name: x for name, x in leaves.items() if is_key(x)}
        return to_host(leaves | (jax.jit(_copy)(keys) if keys else {})), sums
    return jax.jit(_copy, out_shardings={name: spread(x) for name, x in leaves.items()})(leaves), sums


def to_host(copies: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The copies in the host's memory, pinned, as transfers from a GPU are fastest."""
    device: Any = next(iter(next(iter(copies.values())).sharding.device_set))
    if device.platform == "cpu":
        return dict(copies)
    return jax.device_put(dict(copies), {n: x.sharding.with_memory_kind("pinned_host") for n, x in copies.items()})


@jax.jit
def checksums(leaves: dict[str, jax.Array]) -> jax.Array:
    """uint32 [number of leaves], in the order of the sorted names: of each leaf the sum, modulo 2**32, of its elements'
    hashes, each of an element's bits and its place. A changed element changes it, and integers add up to the same in
    every order, so in every layout.

    >>> x = jnp.arange(8.0)
    >>> a, b = checksums({"a": x, "b": x.at[5].set(5.5)})
    >>> bool(a == b), int(a) == int(checksums({"a": x[None]})[0])
    (False, True)
    """
    return jnp.stack([_checksum(_bare(leaves[name])) for name in sorted(leaves)])


def _checksum(x: jax.Array) -> jax.Array:
    size = x.dtype.itemsize
    if x.dtype == bool:
        bits = x.astype(jnp.uint32)
    elif size < 4:
        bits = lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[size]).astype(jnp.uint32)
    else:
        bits = lax.bitcast_convert_type(x, jnp.uint32)  # of eight bytes: two
    place, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for dim in reversed(range(bits.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[dim]
    return jnp.sum(_hash(bits ^ _hash(place)), dtype=jnp.uint32)


def _hash(x: Any) -> Any:
    """A permutation of the uint32s: the finalizer of MurmurHash3 (Appleby, 2011)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def part_of_checksum(values: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """What a box of a leaf of this shape, from `start` on, adds to the leaf's checksum; modulo 2**32. By NumPy.

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
    words, place, stride = max(1, values.itemsize // 4), np.zeros(values.shape, np.uint32), 1
    for dim in reversed(range(values.ndim)):
        steps = (np.arange(start[dim], start[dim] + values.shape[dim], dtype=np.uint64) * stride * words) % 2**32
        place += steps.astype(np.uint32).reshape([-1 if d == dim else 1 for d in range(values.ndim)])
        stride *= shape[dim]
    whole = (place.reshape(-1, 1) + np.arange(words, dtype=np.uint32)).reshape(-1)
    return int(_hash(bits ^ _hash(whole)).sum(dtype=np.uint64))


BLOCK = 2**20  # elements
