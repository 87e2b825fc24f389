"""Reads matrices in MXFP4, as in the downloads of GPT-OSS, as if they were tensors of bfloat16.

A matrix [experts, out, in] is two tensors there: NAME_blocks [experts, out, in / 32, 16] uint8, two elements of 4 bits
a byte, the first in the low bits, and NAME_scales [experts, out, in / 32] uint8. An element is E2M1, and 32 of them
share a power of two with the exponent scale - 127; a scale of 255 makes them NaN (Open Compute Project, Microscaling
Formats 1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). The product of both
is exact in bfloat16. Files without MXFP4 have NAME as [experts, in, out], and so have the tensors of `unpacked`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from jzero.errors import ConfigError
from jzero.weights.name_map import Box
from jzero.weights.safetensors import Entry, File

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*MAGNITUDES, *(-x for x in MAGNITUDES)], np.float32)
SCALES = np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127)
SCALES[255] = np.nan


class Mxfp4File(File):
    """One matrix, made of its blocks and its scales, which leave the files that have them."""

    def __init__(self, name: str, blocks: File, scales: File):
        names = f"{name}_blocks", f"{name}_scales"
        entries = blocks.entries.pop(names[0]), scales.entries.pop(names[1])
        shape, of_scales = (entry.shape for entry in entries)
        if len(shape) != 4 or shape[3] != BLOCK // 2 or of_scales != shape[:3]:
            raise ConfigError(
                f"{blocks.path}: {name} has blocks {list(shape)} and scales {list(of_scales)}; MXFP4 has "
                "[experts, out, in / 32, 16] and [experts, out, in / 32]"
            )
        experts, out, groups, _ = shape
        whole = Entry(np.dtype(ml_dtypes.bfloat16), (experts, groups * BLOCK, out), 0)
        super().__init__(blocks.path, {name: whole}, "r")
        self._blocks, self._scales = (
            File(file.path, {"": entry}, "r") for file, entry in zip((blocks, scales), entries, strict=True)
        )

    def windows(self, name: str, box: Box) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield a box of the matrix expert by expert, as `File.windows` does."""
        experts, inputs, *out = self.entries[name].shape
        self._blocks.reshape("", (experts, *out, inputs // BLOCK, BLOCK // 2))
        self._scales.reshape("", (experts, *out, inputs // BLOCK))
        groups = slice(box[1].start // BLOCK, -(-box[1].stop // BLOCK))
        inside = slice(box[1].start - groups.start * BLOCK, box[1].stop - groups.start * BLOCK)
        for i in range(box[0].stop - box[0].start):
            part = (slice(box[0].start + i, box[0].start + i + 1), *box[2:], groups)
            values = decode(_read(self._blocks, (*part, slice(0, BLOCK // 2))), _read(self._scales, part))
            yield (slice(i, i + 1),), np.moveaxis(values, -1, 1)[:, inside]


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode blocks [..., groups, 16] with scales [..., groups] to float32 [..., groups * 32].

    >>> decode(np.array([[0x21] * 16], np.uint8), np.array([128], np.uint8))[:4].tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
    values = E2M1[codes].reshape(*blocks.shape[:-1], BLOCK) * SCALES[scales][..., None]
    return values.reshape(*values.shape[:-2], -1)


def _read(file: File, box: Box) -> np.ndarray:
    """Read a box of a file's only tensor, window by window."""
    found = np.empty([s.stop - s.start for s in box], file.entries[""].dtype)
    for at, view in file.windows("", box):
        found[at] = view
    return found


def read_whole(file: File) -> np.ndarray:
    """Read a file's only tensor."""
    return _read(file, tuple(slice(0, n) for n in file.entries[""].shape))


def unpacked(files: Sequence[File]) -> list[File]:
    """Put a file of one matrix in the place of the blocks and scales that a file, or two, have of it."""
    where = {name: file for file in files for name in file.entries}
    pairs = ((name, name.removesuffix("_blocks") + "_scales") for name in where if name.endswith("_blocks"))
    return [*files, *(Mxfp4File(x.removesuffix("_blocks"), where[x], where[y]) for x, y in pairs if y in where)]
