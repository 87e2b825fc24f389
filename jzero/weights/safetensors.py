"""The safetensors format: a length (8 bytes, little-endian), a JSON header of that length, then the tensors' bytes.

The header gives every tensor's dtype, shape and place, so tensors can be written and read in any order and in parts.
(https://huggingface.co/docs/safetensors/index#format)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jzero.errors import ConfigError
from jzero.weights.name_map import Box

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"),
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WINDOW = 32 * 2**20  # bytes of a file that are in memory at a time


class Entry(NamedTuple):
    """A tensor of a file: `start` is its first byte's place in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


class File:
    """A safetensors file of which parts are mapped into memory, a window at a time: `create` or `open` one."""

    def __init__(self, path: Path, entries: dict[str, Entry], mode: Any):
        self.path, self.entries, self.mode = path, entries, mode

    @classmethod
    def create(cls, path: Path, arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> File:
        """A new file with room for these tensors, on the disk too: one that is full says so here.

        Raises:
          OSError: a place that cannot be written.
          ConfigError: a dtype that the format has not.
        """
        if unknown := [name for name, (dtype, _) in arrays.items() if dtype not in NAMES]:
            raise ConfigError(f"{unknown[0]} is {arrays[unknown[0]][0]}, which safetensors files do not have")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places, end = {}, 0
        for name, (dtype, shape) in sorted(arrays.items(), key=lambda item: -item[1][0].itemsize):  # aligned
            places[name], start = (dtype, shape, end), end
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
        entries = {name: Entry(dtype, shape, 8 + len(text) + at) for name, (dtype, shape, at) in places.items()}
        return cls(path, entries, "r+")

    @classmethod
    def open(cls, path: Path) -> File:
        """An existing file.

        Raises:
          ConfigError: a file that cannot be read, is not of this format, or is cut short.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 + length:
                    raise ValueError("its header is longer than the file")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries, end = {}, 0
            for name, entry in header.items():
                if entry["dtype"] not in DTYPES:
                    raise ValueError(f"{name} is {entry['dtype']}, of which jzero knows nothing")
                dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
                if stop - start != prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name} has {stop - start} bytes, which are not {entry['dtype']} {shape}")
                entries[name], end = Entry(dtype, shape, 8 + length + start), max(end, 8 + length + stop)
            if size < end:
                raise ValueError(f"it has {size} bytes, and its header speaks of {end}: it is cut short")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
        return cls(path, entries, "r")

    def windows(self, name: str, box: Box) -> Iterator[tuple[tuple, np.ndarray]]:
        """A box of a tensor, as (index into an array of the box's shape, the file's values, to read or to write)."""
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
        """Wait until the disk has it.

        Raises:
          OSError: what it could not write.
        """
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
