"""Reads matrices in fp8, as in the downloads of DeepSeek-V3 and Qwen3, as if they were tensors of bfloat16.

A matrix [out, in] is two tensors there: NAME in E4M3, and NAME_scale_inv [out / 128, in / 128], rounded up, with the
factor of each block of 128 x 128 (DeepSeek-AI, arXiv:2412.19437, section 3.3.2): float32, or Qwen's bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import ml_dtypes
import numpy as np

from jzero.errors import ConfigError
from jzero.weights.mxfp4 import read_whole
from jzero.weights.name_map import Box, Tensor
from jzero.weights.safetensors import Entry, File

BLOCK, SCALES = 128, "_scale_inv"
E4M3, BF16, FLOAT32 = (np.dtype(x) for x in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32))


class Fp8File(File):
    """One matrix, made of its elements and its scales, which leave the files that have them."""

    def __init__(self, name: str, elements: File, scales: File):
        entries = elements.entries.pop(name), scales.entries.pop(name + SCALES)
        (dtype, shape, *_), (of_scales, blocks, *_) = entries
        fits = dtype == E4M3 and of_scales in (FLOAT32, BF16, np.float16) and len(shape) == 2
        if not fits or blocks != tuple(-(-n // BLOCK) for n in shape):
            raise ConfigError(
                f"{elements.path}: {name} is {dtype}{list(shape)} with scales {of_scales}{list(blocks)}; fp8 is "
                "float8_e4m3fn[out, in] with float32, bfloat16 or float16[out / 128, in / 128]"
            )
        super().__init__(elements.path, {name: Entry(BF16, shape, 0)}, "r")
        self._elements, self._scales = (
            File(file.path, {"": entry}, "r") for file, entry in zip((elements, scales), entries, strict=True)
        )
        self._elements.window = 2**20  # 14 MiB while they are decoded

    def divide(self, name: str, parts: Sequence[Tensor]) -> None:
        """Refuse a matrix of several parts: no family whose downloads are in fp8 has one."""
        if len(parts) > 1:
            raise ConfigError(f"{self.path}: {name} is in fp8, and has several parts here: convert it to bf16")

    def windows(self, name: str, box: Box) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield a box of the matrix in windows, as `File.windows` does, but smaller ones: they are in float32 too."""
        *outer, inputs = self.entries[name].shape  # the matrix [out, in] with `out` in several dimensions
        self._elements.reshape("", (*outer, inputs))
        rows = np.arange(prod(outer)).reshape(outer)[box[:-1]] // BLOCK
        columns = np.arange(box[-1].start, box[-1].stop) // BLOCK
        scales = read_whole(self._scales).astype(FLOAT32)
        for at, elements in self._elements.windows("", box):
            yield at, (elements.astype(FLOAT32) * scales[rows[at]][..., columns]).astype(BF16)


def unpacked_fp8(files: Sequence[File]) -> list[File]:
    """Put a file of one matrix in the place of the elements and scales that a file, or two, have of it."""
    where = {name: file for file in files for name in file.entries}
    names = [name.removesuffix(SCALES) for name in where if name.endswith(SCALES)]
    return [*files, *(Fp8File(name, where[name], where[name + SCALES]) for name in names if name in where)]
