"""Writes tensors into safetensors files, from parts of leaves in any order."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jzero.errors import ConfigError
from jzero.weights.name_map import Box, Tensor, assign
from jzero.weights.safetensors import File


class TensorWriter:
    """Creates files with space for their tensors; `write` fills in part of a leaf, `close` waits for the disk.

    Args:
      files: path -> its tensors.

    Raises:
      OSError: a file cannot be written, or the disk is full.
    """

    def __init__(self, files: Mapping[Path, Sequence[Tensor]]):
        self._of_leaf: dict[str, list[tuple[File, Tensor]]] = {}
        self._files = []
        for path, tensors in files.items():
            file = File.create(path, {t.name: (t.dtype, t.shape) for t in tensors})
            self._files.append(file)
            for t in tensors:
                file.reshape(t.name, t.view)
                self._of_leaf.setdefault(t.leaf, []).append((file, t))

    def write(self, leaf: str, box: Box, values: np.ndarray) -> None:
        """Write a box of a leaf into all tensors that contain part of it, in their dtypes.

        Raises:
          ConfigError: a finite value overflows the tensor's dtype.
        """
        for file, tensor in self._of_leaf.get(leaf, ()):  # a leaf may be padding alone
            if (both := tensor.overlap(box)) is None:
                continue
            own, inner = both
            source = tensor.oriented(values[inner])
            for part, view in file.windows(tensor.name, own):
                try:
                    with np.errstate(over="raise"):
                        assign(view, source[part])
                except FloatingPointError:
                    raise ConfigError(
                        f"{tensor.name} has values beyond the range of {tensor.dtype}: jzero export --dtype bfloat16"
                    ) from None

    def close(self) -> None:
        """Wait until everything is on the disk."""
        for file in self._files:
            file.sync()


def unwritable(path: str | os.PathLike, error: OSError) -> ConfigError:
    """Make the ConfigError for an OSError while writing `path`."""
    full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
    return ConfigError(f"{path} cannot be written: {error.strerror or error}{full}")
