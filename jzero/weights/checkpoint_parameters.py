"""The parameters in a checkpoint, read without the model, the mesh or JAX's devices, a part at a time.

A checkpoint's arrays are zarr arrays in an OCDBT store (Orbax's format), named by their path in the TrainState:
`params.stack.attention.qkv.kernel`. Each is divided into chunks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from jzero.checkpoint.checksums import part_of_checksum
from jzero.checkpoint.directory import STATE, find_checkpoint, read_notes
from jzero.errors import CheckpointError, ConfigError, in_a_line
from jzero.weights.name_map import Array, Box, dotted

SMALL = 32 * 2**20  # bytes of a leaf that is read at once
PARAMS = "params/"


class Parameters:
    """Those of a complete checkpoint. Attributes: `path`, `notes`, `leaves` (dotted name -> Array).

    Raises:
      ConfigError: no checkpoint there, one that is not complete or without all parameters, or one that cannot be read.
    """

    def __init__(self, directory: str | os.PathLike, tag: str | float | None = None):
        self.path = find_checkpoint(directory, tag)
        try:
            said = read_notes(self.path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        if said["without"]:
            raise ConfigError(
                f"checkpoint {self.path} was saved without {', '.join(said['without'])} (exclude_frozen_parameters): "
                "export one that has all parameters"
            )
        self.notes, self._context = said["notes"], ts.Context()
        mine = {name: about for name, about in said["leaves"].items() if f"{name}/".startswith(PARAMS)}
        if not mine:
            raise ConfigError(f"checkpoint {self.path} holds no parameters")
        self._stored = {dotted(name.removeprefix("params").removeprefix("/")): dotted(name) for name in mine}
        about = dict(zip(self._stored, mine.values(), strict=True))
        self.leaves = {name: Array(tuple(shape), np.dtype(dtype)) for name, (dtype, shape, _) in about.items()}
        self._sums = {name: checksum for name, (_, _, checksum) in about.items()}

    def read(self, name: str) -> Iterator[tuple[Box, np.ndarray]]:
        """A leaf as (box, its values): chunk by chunk, so that no chunk is decoded twice and no two lie in memory.

        Raises:
          ConfigError: a damaged chunk; at the end, a leaf that is not what was saved.
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
            raise ConfigError(f"checkpoint {self.path} is damaged: {name} is not what was saved (checksums differ)")
