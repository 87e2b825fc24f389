"""Reads a checkpoint's parameters in parts, without the model, the mesh or JAX devices.

Orbax stores every array as chunks of a zarr array in an OCDBT store, named by its path in the TrainState:
`params.stack.attention.qkv.kernel`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from jzero.checkpoint.checksums import part_of_checksum
from jzero.checkpoint.directory import STATE, find_checkpoint, read_notes
from jzero.errors import CheckpointError, ConfigError, in_a_line, some_of
from jzero.weights.name_map import Box, ShapeDtype, dotted

SMALL = 32 * 2**20  # bytes: smaller leaves are read at once
PARAMS = "params/"


class CheckpointParameters:
    """The parameters of a complete checkpoint.

    Attributes:
      path: of the checkpoint.
      notes: as given to `jzero.checkpoint.save`.
      leaves: dotted name -> ShapeDtype.
      without: the names of the parameters that were not saved.

    Raises:
      ConfigError: no checkpoint, or an incomplete or unreadable one.
    """

    def __init__(self, directory: str | os.PathLike, tag: str | float | None = None):
        self.path = find_checkpoint(directory, tag)
        try:
            notes = read_notes(self.path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        self.without = [dotted(name.removeprefix(PARAMS)) for name in notes["without"]]
        self.notes, self._context = notes["notes"], ts.Context()
        mine = {name: about for name, about in notes["leaves"].items() if f"{name}/".startswith(PARAMS)}
        if not mine:
            raise ConfigError(f"checkpoint {self.path} contains no parameters")
        self._stored = {dotted(name.removeprefix("params").removeprefix("/")): dotted(name) for name in mine}
        about = dict(zip(self._stored, mine.values(), strict=True))
        self.leaves = {name: ShapeDtype(tuple(shape), np.dtype(dtype)) for name, (dtype, shape, _) in about.items()}
        self._sums = {name: checksum for name, (_, _, checksum) in about.items()}

    def require(self, names: Collection[str] | None = None) -> list[str]:
        """Return the names of all parameters, or those given.

        Raises:
          ConfigError: the checkpoint was saved without one of them.
        """
        if lacking := [name for name in self.without if names is None or name in names]:
            raise ConfigError(
                f"checkpoint {self.path} was saved without {some_of(lacking)} (exclude_frozen_parameters): export a "
                "checkpoint with all parameters; adapters can be exported alone (jzero export --adapters)"
            )
        return list(self.leaves if names is None else names)

    def read(self, name: str) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield a leaf as (box, values), one chunk at a time.

        The boxes are the stored chunks, because reading half a chunk decodes all of it. The checksum is accumulated on
        the way, since the leaf is never in memory as a whole; it is known, and compared, after the last chunk. A caller
        must not publish results computed from the values before the iteration ends.

        Raises:
          ConfigError: a damaged chunk, or (at the end) a wrong checksum.
        """
        shape, dtype = self.leaves[name]
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.path / STATE}/"}}
        spec = {"driver": "zarr", "kvstore": {**store, "path": f"{self._stored[name]}/"}}
        total = 0
        try:
            array = ts.open(spec, open=True, context=self._context).result()
            small = np.prod(shape, dtype=np.int64) * dtype.itemsize <= SMALL
            chunk: Any = shape if small else array.chunk_layout.read_chunk.shape
            for corner in itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
                box = tuple(slice(i, min(i + c, n)) for i, c, n in zip(corner, chunk, shape, strict=True))
                values = array[box].read().result()
                total += part_of_checksum(values, corner, shape)
                yield box, values
        except (ValueError, OSError) as error:
            raise ConfigError(f"checkpoint {self.path}: {name} cannot be read: {in_a_line(error)}") from None
        if total % 2**32 != self._sums[name]:
            raise ConfigError(f"checkpoint {self.path} is damaged: wrong checksum of {name}")
