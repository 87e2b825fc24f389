"""Reads the local parts of one leaf from files onto their devices, piece by piece, and compares checksums."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from jzero.distributed.host_collectives import gather_texts
from jzero.errors import ConfigError, some_of
from jzero.weights.name_map import Box, Tensor, assign
from jzero.weights.safetensors import File

# Bytes of a device's part of a leaf that are read at a time. Each shape of a piece is a program for each device.
PIECE = 128 * 2**20


def read_leaf(
    parts: list[tuple[File, Tensor]], leaf: jax.ShapeDtypeStruct, sharding: Sharding, check: FileChecksums | None = None
) -> jax.Array:
    """Read this process's slices of a leaf; those that several devices hold are read only once.

    Args:
      parts: the tensors that the leaf consists of, each with its file.
      check: counts what was read.
    """
    slices: dict[str, tuple[Box, list[jax.Device]]] = {}
    local = sharding.addressable_devices_indices_map(leaf.shape)
    for device, index in local.items():
        box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), leaf.shape, strict=True))
        slices.setdefault(str(box), (box, []))[1].append(device)
    shards: dict[jax.Device, jax.Array] = {}
    for box, devices in slices.values():
        targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        shards |= zip(devices, _read_shards(parts, box, leaf.dtype, targets), strict=True)
        if check:
            index = local[devices[0]]
            everywhere: Any = sharding.devices_indices_map(leaf.shape)
            check.add(parts, {device.process_index for device, other in everywhere.items() if other == index})
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [shards[device] for device in local])


def _read_shards(
    parts: list[tuple[File, Tensor]], box: Box, dtype: np.dtype, targets: list[SingleDeviceSharding]
) -> list[jax.Array]:
    """Read a box of a leaf onto each of these devices."""
    shape = tuple(s.stop - s.start for s in box)
    # An update in pinned host memory would need a program of the host; and there the result itself is in that memory.
    elsewhere = targets[0].memory_kind not in (None, jax.local_devices()[0].default_memory().kind)
    if prod(shape) * dtype.itemsize <= PIECE or elsewhere:
        values = _read(parts, box, dtype)
        return jax.block_until_ready([jax.device_put(values, target) for target in targets])
    shards = [jnp.zeros(shape, dtype, device=target) for target in targets]
    for piece in _pieces(box, dtype.itemsize):
        at = [p.start - s.start for p, s in zip(piece, box, strict=True)]
        shards = _updated(shards, _read(parts, piece, dtype), at)
    return shards


def _updated(shards: list[jax.Array], values: np.ndarray, at: list[int]) -> list[jax.Array]:
    """Copy a piece into shards, and wait, so that the host's copy is free before the next piece is read."""
    return jax.block_until_ready([_update(shard, values, at) for shard in shards])


@partial(jax.jit, donate_argnums=0)
def _update(whole: jax.Array, part: jax.Array, at: list[int]) -> jax.Array:
    return lax.dynamic_update_slice(whole, part, at)


def _pieces(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box into pieces of at most `PIECE` bytes, most of them of one shape, so that few programs are compiled.

    >>> [piece[0] for piece in _pieces((slice(2, 7), slice(0, 2**24)), 4)]
    [slice(2, 4, None), slice(4, 6, None), slice(6, 7, None)]
    """
    size = prod(s.stop - s.start for s in box) * itemsize
    if size <= PIECE:
        yield box
        return
    dim = next(i for i, s in enumerate(box) if s.stop - s.start > 1)
    start, stop = box[dim].start, box[dim].stop
    rows = max(1, (stop - start) * PIECE // size)
    for row in range(start, stop, rows):
        yield from _pieces((*box[:dim], slice(row, min(row + rows, stop)), *box[dim + 1 :]), itemsize)


def _read(parts: list[tuple[File, Tensor]], box: Box, dtype: np.dtype) -> np.ndarray:
    """Read a box of a leaf, in the leaf's dtype."""
    values = np.zeros([s.stop - s.start for s in box], dtype)  # padding stays zero
    for file, tensor in parts:
        if (both := tensor.overlap(box)) is None:
            continue
        own, inner = both
        target = tensor.oriented(values[inner])
        for part, view in file.windows(tensor.name, own):
            assign(target[part], view)
    return values


class FileChecksums:
    """Compares what all processes have read with the checksums of the files.

    A tensor's checksum is a sum over its elements. A process adds its parts, so the parts of all make the sum, if each
    counts once; the same part on several processes, which may read copies of the file, must add the same.

    Args:
      wanted: all tensors to be read.
    """

    def __init__(self, wanted: Iterable[tuple[File, Tensor]]):
        self._once, self._copies = Counter[str](), Counter[str]()
        for file, tensor in wanted:
            if (checksum := file.entries[tensor.name].checksum) is not None:
                self._once[file.path.name] -= checksum * self._factor(file, tensor) * (not jax.process_index())

    @staticmethod
    def _factor(file: File, tensor: Tensor) -> int:
        """Return an odd number of the tensor's own, since two tensors that change places must change the file's sum."""
        entry = file.entries[tensor.name]
        return (entry.whole[1] if entry.whole else entry.start) | 1

    def add(self, parts: Iterable[tuple[File, Tensor]], readers: set[int]) -> None:
        """Count what was read for one slice of a leaf.

        Args:
          readers: the processes that read the same slice.
        """
        first = jax.process_index() == min(readers)
        for file, tensor in parts:
            if (entry := file.entries[tensor.name]).checksum is None:
                continue
            part = file.sums.pop(entry.whole[0] if entry.whole else tensor.name, 0) * self._factor(file, tensor)
            self._once[file.path.name] += part * first
            self._copies[file.path.name] += part * (1 - len(readers) * first)

    def finish(self, directory: str | os.PathLike) -> None:
        """Compare the sums of all processes.

        Raises:
          ConfigError: names the damaged files, on all processes.
        """
        mine = {name: [x % 2**64, self._copies[name] % 2**64] for name, x in self._once.items()}
        found = [json.loads(text) for text in gather_texts("checksums of the weights", json.dumps(mine))]
        with_checksums = set.intersection(*map(set, found))  # of copies, one may be without
        damaged = [
            name for name in sorted(with_checksums)
            if any(sum(sums) % 2**64 for sums in zip(*(one[name] for one in found), strict=True))
        ]  # fmt: skip
        if damaged:
            raise ConfigError(
                f"{os.fspath(directory)}: damaged: values in {some_of(damaged)} do not match their checksums; copy or "
                "export the weights again"
            )
