"""Reads and writes parts of safetensors files.

The format is a length (8 bytes, little-endian), a JSON header of that length, then the tensors' bytes. The header gives
the dtype, shape and offset of every tensor, so tensors can be read and written in any order and in parts.
(https://huggingface.co/docs/safetensors/index#format)
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jzero.errors import ConfigError
from jzero.weights.header import DTYPES, MOST, Entry, parse_header
from jzero.weights.name_map import Box

NAMES = {dtype: name for name, dtype in DTYPES.items()}
WINDOW = 32 * 2**20  # bytes of a file that are mapped at a time


class File:
    """A safetensors file, made by `create` or `open`.

    Parts are mapped into memory one window at a time, so that at most one window counts as this process's memory.
    """

    def __init__(self, path: Path, entries: dict[str, Entry], mode: Literal["r", "r+"]):
        self.path, self.entries, self.mode = path, entries, mode

    @classmethod
    def create(cls, path: Path, arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> File:
        """Create a file with space for tensors.

        The space is allocated on the disk, so that a full disk raises an error here. A write through a memory map of a
        sparse file would kill the process with SIGBUS instead.

        Raises:
          OSError: the file cannot be written or the disk is full.
          ConfigError: safetensors does not support a dtype.
        """
        if unknown := [name for name, (dtype, _) in arrays.items() if dtype not in NAMES]:
            raise ConfigError(f"{unknown[0]} has dtype {arrays[unknown[0]][0]}, which safetensors files do not support")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        # Largest elements first, so that every tensor starts at a multiple of its element size.
        for name, (dtype, shape) in sorted(arrays.items(), key=lambda item: -item[1][0].itemsize):
            offsets[name], start = (dtype, shape, end), end
            end += prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            size = 8 + len(text) + end
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
        entries = {name: Entry(dtype, shape, 8 + len(text) + at) for name, (dtype, shape, at) in offsets.items()}
        return cls(path, entries, "r+")

    @classmethod
    def open(cls, path: Path) -> File:
        """Open an existing file.

        Raises:
          ConfigError: the file cannot be read, has another format, or is truncated.
        """
        try:
            if not stat.S_ISREG((status := path.stat()).st_mode):
                raise ValueError("it is not a regular file")
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if status.st_size < 8 + length:
                    raise ValueError("its header is longer than the file")
                if length > MOST:
                    raise ValueError(f"its header has {length} bytes; at most {MOST} are allowed")
                entries = parse_header(file.read(length), status.st_size)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not a complete safetensors file: {error}") from None
        return cls(path, entries, "r")

    def reshape(self, name: str, shape: tuple[int, ...]) -> None:
        """Address a tensor by boxes of another shape, which has the same elements in the same order."""
        self.entries[name] = self.entries[name]._replace(shape=shape)

    def windows(self, name: str, box: Box) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield a box of a tensor in windows: (index into an array of the box's shape, memory-mapped values).

        Assigning to the values writes to the file. The first axis whose stride fits into a window is cut into ranges of
        rows; the axes before it are iterated index by index.
        """
        dtype, shape, start = self.entries[name]
        if 0 in shape:
            return
        if not shape:
            yield (...,), self._map(dtype, start, (1,)).reshape(())
            return
        strides = [prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
        axis = next(i for i, stride in enumerate(strides) if stride <= WINDOW or i == len(shape) - 1)
        length, rows = box[axis].stop - box[axis].start, max(1, WINDOW // strides[axis])
        for lead in np.ndindex(*[s.stop - s.start for s in box[:axis]]):
            before = sum((s.start + i) * stride for s, i, stride in zip(box, lead, strides, strict=False))
            for row in range(0, length, rows):
                some = min(rows, length - row)
                at = start + before + (box[axis].start + row) * strides[axis]
                mapped = self._map(dtype, at, (some, *shape[axis + 1 :]))
                yield (*lead, slice(row, row + some)), mapped[(slice(None), *box[axis + 1 :])]

    def _map(self, dtype: np.dtype, at: int, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(np.memmap(self.path, dtype, self.mode, at, shape))

    def sync(self) -> None:
        """Wait until the file is on the disk.

        Raises:
          OSError: it could not be written.
        """
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
