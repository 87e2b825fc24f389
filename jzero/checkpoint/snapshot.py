"""A copy of a state's leaves that training cannot overwrite, on the devices or on the way to the host.

Layer stacks are stored layer by layer, under the names that the layers have in the module. So a checkpoint is the same
with and without `from_flax(..., stack=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jzero.checkpoint.checksums import checksums, is_key, key_data
from jzero.layout.offload import HOST

Names = Mapping[str, tuple[str, ...]]  # of a leaf in a checkpoint: one, or one for each layer


def copy_sharding(x: jax.Array) -> Sharding | None:
    """Choose the sharding of a leaf's copy: also over the mesh axes that replicate the leaf, if a dimension divides.

    Every device then transfers its own part to the host and every process writes its own part, instead of one replica
    doing all the work. None for random keys and for arrays without a mesh.
    """
    return None if is_key(x) or not isinstance(x.sharding, NamedSharding) else divide_further(x.sharding, x.shape)


def divide_further(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Divide an array over the unused mesh axes too, if one of its dimensions divides."""
    mesh, spec = sharding.mesh, [*sharding.spec] + [None] * (len(shape) - len(sharding.spec))
    axes = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    more = tuple(name for name, n in mesh.shape.items() if n > 1 and not any(name in part for part in axes))
    for dim, size in enumerate(shape):
        if size and size % prod(mesh.shape[name] for name in axes[dim] + more) == 0:
            axes[dim] += more  # the first dimension that all unused axes divide
            return NamedSharding(mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)
    return sharding


def has_room(leaves: Mapping[str, jax.Array]) -> bool:
    """Return whether this process's devices have memory for the copies on top of what a train step needs.

    The peak so far shows the memory that a step needs. A peak below 1.2 times the copies means that no step has run
    yet: False. CPU devices report no statistics: True.
    """
    size = 0
    for x in leaves.values():
        size += prod(to.shard_shape(x.shape)) * x.dtype.itemsize if (to := copy_sharding(x)) else 0
    devices: Any = next(iter(leaves.values())).sharding.addressable_devices
    for device in devices:
        if stats := device.memory_stats():
            peak = stats["peak_bytes_in_use"]
            if peak < 1.2 * size or peak + size > 0.98 * stats["bytes_limit"]:
                return False
    return True


def snapshot(leaves: Mapping[str, jax.Array], names: Names, room: bool) -> tuple[dict[str, jax.Array], jax.Array]:
    """Copy the leaves: (copies in buffers of their own, checksums), by their stored names, without waiting for devices.

    With `room`, the copies are on the devices (0.9 ms per GiB on an H200, a hundredth of the transfer to the host).
    Otherwise they are on the way to the host, and a train step that takes the leaves' buffers waits for the transfer.
    """
    whole = {names[name][0]: x for name, x in leaves.items() if len(names[name]) == 1}
    layers: dict[str, jax.Array] = {}
    for name, x in leaves.items():
        if len(names[name]) > 1:  # in buffers of their own, spread over all devices; to the host one leaf at a time
            parts = jax.jit(tuple, out_shardings=(layer_sharding(x.sharding, x.shape),) * len(x))(x)
            own = dict(zip(names[name], parts, strict=True))
            layers |= own if room else copy_to_pinned_memory(own)
    sums = checksums(whole | layers)
    if not room:
        keys = {name: x for name, x in whole.items() if is_key(x)}
        # Random keys cannot be transferred as such, so their data is copied first.
        return copy_to_pinned_memory(whole | layers | (jax.jit(_copies)(keys) if keys else {})), sums
    copies = jax.jit(_copies, out_shardings={name: copy_sharding(x) for name, x in whole.items()})(whole)
    return copies | layers, sums


def copy_to_pinned_memory(copies: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Transfer the copies to pinned host memory, the fastest transfer from a GPU."""
    device: Any = next(iter(next(iter(copies.values())).sharding.device_set))
    if device.platform == "cpu":
        return dict(copies)
    return jax.device_put(dict(copies), {n: x.sharding.with_memory_kind(HOST) for n, x in copies.items()})


def layer_sharding(sharding: Any, shape: Sequence[int]) -> Sharding:
    """Choose the sharding of one layer of a stacked leaf, over all devices where a dimension divides."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)
    return divide_further(layer, tuple(shape[1:]))


def _copies(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.copy(key_data(x)) for name, x in leaves.items()}
