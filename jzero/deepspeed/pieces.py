"""Named tensors that are stored as pieces in several files, read like the tensors of a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np

from jzero.deepspeed.torch_files import TorchTensor
from jzero.weights.name_map import Box
from jzero.weights.safetensors import Entry, File


def cut_pieces(tensors: Sequence[TorchTensor], start: int, size: int) -> list[TorchTensor]:
    """Return the pieces that hold `size` numbers from `start` on, of flat tensors in a row.

    Raises:
      ValueError: they hold fewer.
    """
    found, begin = [], 0
    for tensor in tensors:
        first, last = max(start - begin, 0), min(start + size - begin, tensor.size)
        if first < last:
            at = tensor.start + first * tensor.dtype.itemsize
            found.append(tensor._replace(shape=(last - first,), start=at))
        begin += tensor.size
    if start < 0 or sum(piece.size for piece in found) != size:
        raise ValueError(f"its flat tensors have {begin} numbers, and a parameter is at {start} to {start + size}")
    return found


def cut_group(
    parts: Sequence[TorchTensor], masters: Sequence[TorchTensor], spans: Sequence[tuple[int, int]]
) -> list[list[TorchTensor]]:
    """Return the pieces of each parameter of a group, which stages 1 and 2 of ZeRO cut into a part for each rank.

    ZeRO does not cut Muon's momentum. If a rank stores a part of a matrix, it stores the whole momentum of that matrix.

    Args:
      parts: each rank's flat tensor.
      masters: each rank's flat tensor of master weights.
      spans: (start, size) of each parameter in the row of the master weights.

    Raises:
      ValueError: the tensors hold fewer numbers.
    """
    found, ends, each = [], [0] * len(parts), masters[0].size  # the last may lack its padding
    if max(part.size for part in parts) <= each:
        return [cut_pieces(parts, *span) for span in spans]
    for start, size in spans:
        pieces: list[TorchTensor] = []
        for rank in range(start // each, -(-(start + size) // each)):
            pieces = cut_pieces([parts[rank]], ends[rank], size)
            ends[rank] += size
        found.append(pieces)
    return found


class TensorPieces(File):
    """Tensors of one kind, such as the master weights, without checksums; `path` is that of the checkpoint."""

    def __init__(self, path: Path):
        super().__init__(path, {}, "r")
        self._pieces: dict[str, list[TorchTensor]] = {}

    def add(self, name: str, shape: Sequence[int], pieces: list[TorchTensor]) -> None:
        """Add a tensor whose numbers are those of the pieces, in their order.

        Raises:
          ValueError: they are not as many as the shape needs.
        """
        if sum(piece.size for piece in pieces) != prod(shape):
            raise ValueError(f"{name} {tuple(shape)} has {sum(piece.size for piece in pieces)} numbers")
        dtype = pieces[0].dtype if pieces else np.dtype(np.float32)
        self.entries[name], self._pieces[name] = Entry(dtype, tuple(shape), 0), pieces

    def rename(self, change: Callable[[str], str]) -> None:
        """Give all tensors other names."""
        self.entries = {change(name): entry for name, entry in self.entries.items()}
        self._pieces = {change(name): pieces for name, pieces in self._pieces.items()}

    def windows(self, name: str, box: Box) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield a box of a tensor in windows of rows: (index into an array of the box's shape, values)."""
        dtype, shape, *_ = self.entries[name]
        if not shape:
            yield (...,), self._read(name, 0, 1).reshape(())
        if not shape or 0 in shape:
            return
        row = prod(shape[1:])
        some = max(1, File.window // (row * dtype.itemsize))
        for start in range(box[0].start, box[0].stop, some):
            stop = min(start + some, box[0].stop)
            values = self._read(name, start * row, stop * row).reshape(stop - start, *shape[1:])
            yield (slice(start - box[0].start, stop - box[0].start),), values[(slice(None), *box[1:])]

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return a range of a tensor's numbers."""
        found = [piece.read() for piece in cut_pieces(self._pieces[name], start, stop - start)]
        return found[0] if len(found) == 1 else np.concatenate(found)
