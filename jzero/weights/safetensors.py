"""Reads and writes parts of safetensors files, in any order.

The format is a length (8 bytes, little-endian), a JSON header of that length, then the tensors' bytes. The header gives
the dtype, shape and offset of every tensor, so tensors can be read and written in any order and in parts.
(https://huggingface.co/docs/safetensors/index#format)

A header that two readers understand differently gives one of them other bytes than the tensor's. So the tensors must
fill the file without gaps and overlaps, in bytes that their dtypes and shapes need, and no name may occur twice, as the
`safetensors` package demands.

jzero's own files have checksums in their metadata, which other readers ignore: "jzero.checksums": "jzero:" + 8 digits,
the header's CRC-32 with zeros in their place, + ":" + 16 digits for each tensor, in the order of their bytes.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from jzero.errors import ConfigError
from jzero.weights.name_map import Box, Tensor, assign, by_tensor, whole_shape

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"),
}  # fmt: skip
MOST = 100_000_000  # bytes of a header, as in the package
LONGEST = 1000  # characters of a name: longer ones are damage, and would fill an error message
CHECKSUMS, MARK = "jzero.checksums", "jzero:"  # of the metadata: a key, and how its value begins
_FIELDS = {"dtype", "shape", "data_offsets"}


class Entry(NamedTuple):
    """A tensor of a file; `start` is the offset of its first byte, `checksum` is None in files of other programs."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    checksum: int | None = None
    whole: tuple[str, int] | None = None  # of a part: name and start; the first part has the checksum, the others 0


def sealed(text: bytes, checksums: Iterable[int]) -> bytes:
    """Write checksums, and the header's own, over those in the text of a header.

    >>> sealed(b'{"__metadata__": {"jzero.checksums": "jzero:00000000:0000000000000000"}}', [255])
    b'{"__metadata__": {"jzero.checksums": "jzero:77d09b9b:00000000000000ff"}}'
    """
    begin = text.index(f'"{MARK}'.encode()) + 1 + len(MARK)
    end = text.index(b'"', begin)
    before, sums = text[:begin], b":" + "".join(f"{checksum:016x}" for checksum in checksums).encode()
    crc = zlib.crc32(before + b"0" * 8 + sums + text[end:])
    return before + f"{crc:08x}".encode() + sums + text[end:]


def parse_header(text: bytes, size: int) -> dict[str, Entry]:
    """Parse a header.

    Args:
      text: the header.
      size: of the whole file, in bytes.

    Raises:
      ValueError: a header that is not valid, or does not describe a file of this size; the message is one short line.
    """
    try:
        header = json.loads(
            text.decode(), object_pairs_hook=_once, parse_int=_natural, parse_float=_natural, parse_constant=_natural
        )
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__ = {_short(metadata)}: must map names to strings")
    "".join([*metadata, *metadata.values()]).encode()  # half of a surrogate pair is an error
    begin = 8 + len(text)
    entries, end = {}, 0
    for name, (dtype, shape, start, stop) in sorted(
        ((name, _tensor(name, entry)) for name, entry in header.items()), key=lambda item: item[1][2:]
    ):
        if start != end:
            raise ValueError(f"{name} begins at byte {start}, where {end} bytes are described before it")
        if stop - start != _bytes(dtype, shape):
            raise ValueError(f"{name} has {stop - start} bytes, which does not match {dtype} {_short(shape)}")
        entries[name], end = Entry(DTYPES[dtype], tuple(shape), begin + start), stop
    if size < begin + end:
        raise ValueError(f"it has {size} bytes but its header describes {begin + end}: it is truncated")
    if size > begin + end:
        raise ValueError(f"it has {size} bytes but its header describes {begin + end}: the rest belongs to no tensor")
    checksums = _checksums(metadata, text, len(entries))
    return {name: entry._replace(checksum=x) for (name, entry), x in zip(entries.items(), checksums, strict=True)}


def _checksums(metadata: dict[str, str], text: bytes, count: int) -> list[int] | list[None]:
    """Return the tensors' checksums, after a comparison of the header's own."""
    # The value has a mark too, so that a damaged key does not make a file without checksums of it.
    marked = [value for key, value in metadata.items() if key == CHECKSUMS or value.startswith(MARK)]
    if not marked:
        return [None] * count
    try:
        digits = marked[0].rpartition(":")[2]
        sums = [int(digits[i : i + 16], 16) for i in range(0, len(digits), 16)]
        if len(sums) == count and sealed(text, sums) == text:
            return sums
    except ValueError:
        pass
    raise ValueError(
        "its header does not match its checksum: copy or export it again (if another program rewrote it: without "
        f"{CHECKSUMS} in the metadata)"
    )


def _tensor(name: str, entry: Any) -> tuple[str, list[int], int, int]:
    """Return a tensor's (dtype, shape, start, stop)."""
    if not name.isprintable() or len(name) > LONGEST:
        raise ValueError(f"a tensor has the name {_short(name)}: must be printable and at most {LONGEST} characters")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError(f"{name} must have {', '.join(sorted(_FIELDS))}; it has {_short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has the unsupported dtype {_short(dtype)}; supported: {', '.join(DTYPES)}")
    for field, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise ValueError(f"{name} has {field} {_short(numbers)}: must be a list of integers")
    if len(offsets) != 2:
        raise ValueError(f"{name} has data_offsets {_short(offsets)}: must be two integers")
    return dtype, shape, offsets[0], offsets[1]


def _bytes(dtype: str, shape: list[int]) -> int:
    """Multiply from the left: a product beyond 64 bits is an error, even if the next dimension is 0."""
    total = 1
    for n in [*shape, DTYPES[dtype].itemsize]:
        if (total := total * n) >= 2**64:
            raise ValueError(f"{dtype} {_short(shape)} has more than 2**64 bytes")
    return total


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object whose names occur once; `dict` would keep the last of two values."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"its header has {_short(name)} twice")
        found[name] = value
    return found


def _natural(text: str) -> int:
    if not text.isdecimal() or len(text) > 20 or (number := int(text)) >= 2**64:
        raise ValueError(f"its header contains {_short(text)}: must be an integer from 0 to 2**64 - 1")
    return number


def _short(x: Any) -> str:
    """Return the representation of a value in one line of at most 80 characters."""
    text = ascii(x[:LONGEST] if isinstance(x, str | list) else x)
    return text if len(text) <= 80 else text[:77] + "..."


NAMES = {dtype: name for name, dtype in DTYPES.items()}
Merging = Callable[[str, Box, np.ndarray], Iterable[tuple[Box, np.ndarray]]]


class File:
    """A safetensors file, made by `create` or `open`.

    Parts are mapped into memory one window at a time, so that at most one window counts as this process's memory.

    Attributes:
      sums: what the parts that were read or written add to their tensors' checksums; of files with checksums.
    """

    window = 32 * 2**20  # bytes of a file that are mapped at a time

    def __init__(self, path: Path, entries: dict[str, Entry], mode: Literal["r", "r+"]):
        self.path, self.entries, self.mode, self._names = path, entries, mode, list(entries)
        self.sums: Counter[str] = Counter()

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
        unknown_yet = f"{MARK}{'0' * 8}:{'0' * 16 * len(arrays)}"
        header: dict[str, Any] = {"__metadata__": {"format": "pt", CHECKSUMS: unknown_yet}}
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
        entries = {name: Entry(dtype, shape, 8 + len(text) + at, 0) for name, (dtype, shape, at) in offsets.items()}
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

    def divide(self, name: str, parts: Sequence[Tensor]) -> None:
        """Address the parts of a tensor along its first dimension, if it is made of these, by their own names."""
        dtype, shape, start, checksum, _ = self.entries[name]
        if [part.name for part in parts] == [name] or shape != whole_shape(parts):
            return
        del self.entries[name]
        whole = name, start
        for part in parts:
            self.entries[part.name] = Entry(dtype, part.shape, start, checksum, whole)
            start += prod(part.shape) * dtype.itemsize
            checksum = checksum and 0

    def windows(self, name: str, box: Box) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield a box of a tensor in windows: (index into an array of the box's shape, memory-mapped values).

        Assigning to the values writes to the file. The first axis whose stride fits into a window is cut into ranges of
        rows; the axes before it are iterated index by index. The checksum of a window is taken after its use.
        """
        dtype, shape, start, checksum, whole = self.entries[name]
        name, origin = whole or (name, start)
        before = (start - origin) // dtype.itemsize
        if 0 in shape:
            return
        if not shape:
            view = self._map(dtype, start, (1,))
            yield (...,), view.reshape(())
            self.sums[name] += 0 if checksum is None else checksum_of(view, (0,), (1,))
            return
        strides = [prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
        axis = next(i for i, stride in enumerate(strides) if stride <= self.window or i == len(shape) - 1)
        length, rows = box[axis].stop - box[axis].start, max(1, self.window // strides[axis])
        for lead in np.ndindex(*[s.stop - s.start for s in box[:axis]]):
            skipped = sum((s.start + i) * stride for s, i, stride in zip(box, lead, strides, strict=False))
            for row in range(0, length, rows):
                some = min(rows, length - row)
                at = start + skipped + (box[axis].start + row) * strides[axis]
                mapped = self._map(dtype, at, (some, *shape[axis + 1 :]))
                view = mapped[(slice(None), *box[axis + 1 :])]
                yield (*lead, slice(row, row + some)), view
                if checksum is not None:
                    corner = [(at - start) // strides[axis], *(s.start for s in box[axis + 1 :])]
                    self.sums[name] += checksum_of(view, corner, shape[axis:], before)

    def _map(self, dtype: np.dtype, at: int, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(np.memmap(self.path, dtype, self.mode, at, shape))

    def finish(self) -> None:
        """Write the checksums of a created file, and wait until it is on the disk.

        Raises:
          OSError: it could not be written.
        """
        with self.path.open("rb+") as file:
            text = file.read(int.from_bytes(file.read(8), "little"))
            file.seek(8)
            file.write(sealed(text, (self.sums[name] % 2**64 for name in self._names)))
            file.flush()
            os.fsync(file.fileno())


class TensorWriter:
    """Creates files with space for their tensors; `write` fills in part of a leaf, `close` ends the files.

    Args:
      files: path -> its tensors.
      merge: turns a part of a leaf, (name, box, values), into the parts to write, (box, values).

    Raises:
      OSError: a file cannot be written, or the disk is full.
    """

    def __init__(self, files: Mapping[Path, Sequence[Tensor]], merge: Merging | None = None):
        self._merge: Merging = merge or (lambda leaf, box, values: [(box, values)])
        self._of_leaf: dict[str, list[tuple[File, Tensor]]] = {}
        self._files = []
        for path, tensors in files.items():
            wholes = by_tensor(tensors)
            shapes = {name: (parts[0].dtype, whole_shape(parts)) for name, parts in wholes.items()}
            file = File.create(path, shapes)
            self._files.append(file)
            for name, parts in wholes.items():
                file.divide(name, parts)
            for t in tensors:
                file.reshape(t.name, t.view)
                self._of_leaf.setdefault(t.leaf, []).append((file, t))

    def write(self, leaf: str, box: Box, values: np.ndarray) -> None:
        """Write a box of a leaf into all tensors that contain part of it, in their dtypes.

        Raises:
          ConfigError: a finite value overflows the tensor's dtype.
        """
        for part_box, part in self._merge(leaf, box, values):
            for file, tensor in self._of_leaf.get(leaf, ()):  # a leaf may be padding alone
                if (both := tensor.overlap(part_box)) is None:
                    continue
                own, inner = both
                source = tensor.oriented(part[inner])
                for at, view in file.windows(tensor.name, own):
                    try:
                        with np.errstate(over="raise"):
                            assign(view, source[at])
                    except FloatingPointError:
                        raise ConfigError(
                            f"{tensor.name} has values beyond the range of {tensor.dtype}: jzero export --dtype "
                            "bfloat16"
                        ) from None

    def close(self) -> None:
        """Write the checksums, and wait until everything is on the disk."""
        for file in self._files:
            file.finish()


def checksum_of(values: np.ndarray, start: Sequence[int], shape: Sequence[int], before: int = 0) -> int:
    """Compute what a part of a tensor adds to its checksum, the sum of word * (2 * index + 1) modulo 2**64.

    The words are the elements' bits, those of 8 bytes in two words. Any division of a tensor gives the same sum, and a
    changed or moved word another one. Two passes: ten times as fast as a checkpoint's hash of each element.

    Args:
      values: the part, of at least one dimension.
      start: the index of its first element in the tensor.
      shape: of the tensor; the first dimension does not matter.
      before: elements of a larger tensor that come before this one.

    >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> parts = checksum_of(x[:, :1], (0, 0), x.shape) + checksum_of(x[:, 1:], (0, 1), x.shape)
    >>> parts % 2**64 == checksum_of(x, (0, 0), x.shape)
    True
    """
    words, start, shape, before = values, [*start], [*shape], 2 * before
    if values.itemsize == 8:  # the highest bits of two words of 64 bits would cancel
        words, start, shape = np.ascontiguousarray(values)[..., None].view(np.uint32), [*start, 0], [*shape, 2]
        before *= 2
    words, total, stride = words.view(f"u{words.itemsize}"), 0, 2
    while words.ndim:
        by_column = words.sum(tuple(range(words.ndim - 1)), np.uint64)
        column = start.pop()
        total += stride * int(by_column @ np.arange(column, column + len(by_column), dtype=np.uint64))
        stride *= shape.pop()
        words = words.sum(-1, np.uint64)
    return (total + (before + 1) * int(words)) % 2**64
