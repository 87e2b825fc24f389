"""Reads the header of a safetensors file, and refuses every header that the `safetensors` package refuses.

A header that two readers understand differently gives one of them other bytes than the tensor's. So the tensors must
fill the file without gaps and overlaps, in bytes that their dtypes and shapes need, and no name may occur twice.

jzero's own files have checksums in their metadata, which other readers ignore: "jzero.checksums": "jzero:" + 8 digits,
the header's CRC-32 with zeros in their place, + ":" + 16 digits for each tensor, in the order of their bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

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
