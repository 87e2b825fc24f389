"""Reads files of `torch.save` without PyTorch: tensors stay in the file, and no code of the file runs.

Such a file is a zip archive without compression: data.pkl, a pickle, and data/N, the bytes of storage N. A pickle is a
program. This one runs with the operations that `torch.save` writes, on a table of functions that is complete below:
every other name is refused, and an operation that could allocate more than the file holds is not in the table.
Source: torch/serialization.py and torch/_utils.py of PyTorch 2.13.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from jzero._compat import python_unpickler
from jzero.errors import ConfigError, in_a_line, one_line, shorten

Pickled: TypeAlias = Any  # what a pickle has made: text, numbers, dicts, lists, tuples, `TorchTensor`, `Record`
DTYPES = {
    "FloatStorage": np.dtype("<f4"), "DoubleStorage": np.dtype("<f8"), "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16), "LongStorage": np.dtype("<i8"), "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"), "CharStorage": np.dtype("i1"), "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("bool"),
}  # fmt: skip
LOCAL_HEADER = 30  # bytes of a zip entry's own header, before its name


class TorchTensor(NamedTuple):
    """A tensor in a file, in the order of C; `start` is the offset of its first byte."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Map a range of the elements into memory; they are read from the disk when they are used."""
        stop = self.size if stop is None else stop
        if stop == start:
            return np.zeros(0, self.dtype)
        at = self.start + start * self.dtype.itemsize
        return np.asarray(np.memmap(self.path, self.dtype, "r", at, (stop - start,)))


class Record(NamedTuple):
    """An instance of a class of DeepSpeed: its name and its attributes, without the class."""

    kind: str
    fields: dict[str, Pickled]


def load_torch(path: Path) -> Pickled:
    """Read what `torch.save` wrote: dicts, lists, numbers, `TorchTensor` and `Record`.

    Raises:
      ConfigError: the file cannot be read, is damaged, or its pickle has anything else in it.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _Reader(path, _storages(archive, file)).load()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    # Damage ends in any of a dozen exceptions: struct.error, KeyError of an operation, BadZipFile, UnicodeDecodeError
    except Exception as error:
        advice = "" if zipfile.is_zipfile(path) else " (files from before PyTorch 1.6 must be saved again)"
        raise ConfigError(f"{path} is not a file of torch.save that jzero reads: {in_a_line(error)}{advice}") from None


class _Entry(NamedTuple):
    """The bytes of an entry of the archive."""

    start: int
    size: int


class _Storage(NamedTuple):
    """An entry as numbers."""

    entry: _Entry
    dtype: np.dtype
    path: Path


def _storages(archive: zipfile.ZipFile, file: Pickled) -> dict[str, _Entry]:
    """Map the names of the archive's entries, without its folder, to their bytes in the file."""
    length, found = file.seek(0, io.SEEK_END), {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{one_line(entry.filename)} is compressed")
        file.seek(entry.header_offset)
        header = file.read(LOCAL_HEADER)  # it may have other lengths than the directory at the end
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = entry.header_offset + LOCAL_HEADER + names
        if header[:4] != b"PK\3\4" or start + entry.file_size > length:
            raise ValueError(f"{one_line(entry.filename)} is outside of the file: it is truncated")
        name = entry.filename.partition("/")[2]
        if name in found:
            raise ValueError(f"it has {one_line(name)} twice")
        found[name] = _Entry(start, entry.file_size)
        if name in ("data.pkl", "byteorder"):  # a damaged pickle may be a valid one
            file.seek(start)
            if zlib.crc32(file.read(entry.file_size)) != entry.CRC:
                raise ValueError(f"{name} does not match its checksum, or was saved with set_crc32_options(False)")
    return found


# ---- the pickle ---------------------------------------------------------------------------------------------------

# What protocols 2 to 4 write for numbers, text, lists, dicts, tuples and references. Not in it: EXT, INST, OBJ, sets,
# and BYTEARRAY8, which allocates as many bytes as it names.
PLAIN = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINSTRING",
    "SHORT_BINSTRING", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND",
    "APPENDS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "BINPERSID",
)  # fmt: skip


class _Name(NamedTuple):
    """A name of the pickle that stands for no value yet: a class of DeepSpeed, or a type of storage."""

    text: str


class _Function(NamedTuple):
    """A function of the table."""

    call: Callable[..., Pickled]


def _rebuild_tensor(storage: Pickled, offset: int, shape: Pickled, strides: Pickled, *_: Pickled) -> TorchTensor:
    """Make the tensor that `torch._utils._rebuild_tensor_v2` makes."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor has no storage")
    (start, size), dtype, path = storage
    if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)) or len(shape) > 32:
        raise ValueError("a tensor has a shape that is not made of whole numbers")
    dense = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if 0 not in shape and any(n > 1 and a != b for n, a, b in zip(shape, strides, dense, strict=True)):
        raise ValueError(f"a tensor {shape} is not contiguous: save it with .contiguous()")
    if (offset + prod(shape)) * dtype.itemsize > size:
        raise ValueError(f"a tensor {shape} is larger than its storage of {size} bytes")
    return TorchTensor(path, dtype, tuple(shape), start + offset * dtype.itemsize)


def _rebuild_parameter(data: TorchTensor, *_: Pickled) -> TorchTensor:
    if not isinstance(data, TorchTensor):
        raise ValueError("a parameter has no tensor")
    return data


def _rebuild_typed(function: Pickled, kind: Pickled, args: Pickled, state: Pickled) -> Pickled:
    """Make a tensor that has attributes, such as the `ds_id` of ZeRO-3, which fall away."""
    if function is not FUNCTIONS["torch._utils._rebuild_tensor_v2"]:
        raise ValueError("a tensor is made by another function than torch.save's")
    return function.call(*args)


def _shape(sizes: Pickled) -> tuple[int, ...]:
    if type(sizes) is not tuple or len(sizes) > 32 or not all(type(n) is int for n in sizes):
        raise ValueError("a torch.Size is no tuple of at most 32 whole numbers")
    return sizes


def _ordered() -> dict:
    return {}  # torch.save sets its items one by one


def _set(items: Pickled) -> list:
    """Keep the list of a set, as older DeepSpeed's `sparse_tensor_module_names` is one: no hash is computed."""
    if type(items) is not list:
        raise ValueError("it makes a set of something that is no list")
    return items


FUNCTIONS = {
    "torch._utils._rebuild_tensor_v2": _Function(_rebuild_tensor),
    "torch._utils._rebuild_parameter": _Function(_rebuild_parameter),
    "torch._tensor._rebuild_from_type_v2": _Function(_rebuild_typed),
    "torch.Size": _Function(_shape),
    "collections.OrderedDict": _Function(_ordered),
    "__builtin__.set": _Function(_set),  # protocol 2's name
}
FLOATS = ("float32", "float16", "bfloat16")
TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter", *(f"torch.{name}" for name in (*DTYPES, *FLOATS))}


def _fill(target: dict, items: list) -> dict:
    """Set keys of a dict, in pairs; only of types whose hash is cheap."""
    if type(target) is not dict:
        raise ValueError("it sets a key of something that is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int | float | None):  # the hash of nested tuples recurses without end
            raise ValueError(f"it has a key of type {type(key).__name__}")
        if isinstance(key, int) and abs(key) >= 2**63:  # multiples of 2**61 - 1 have one hash: quadratic time
            raise ValueError("it has a key of more than 64 bits")
        target[key] = value
    return target


class _Reader(python_unpickler()):  # type: ignore[misc]  # CPython's unpickler in Python, whose memo is a dict
    """Runs the pickle of a file, operation by operation.

    CPython's in C would allocate a memo as long as the largest number in the file.
    """

    stack: list[Pickled]
    dispatch: Mapping[int, Callable[[Pickled], None]] = {}

    def __init__(self, path: Path, storages: Mapping[str, _Entry]):
        for name in ("data.pkl", "version"):
            if name not in storages:
                raise ValueError(f"it has no {name}")
        self._path, self._storages = path, storages
        with path.open("rb") as file:
            if (order := storages.get("byteorder")) is not None:
                file.seek(order.start)
                if file.read(order.size) != b"little":
                    raise ValueError("its numbers are big-endian")
            start, size = storages["data.pkl"]
            file.seek(start)
            super().__init__(io.BytesIO(file.read(size)))
        self._left = size  # attributes that may still be set: each takes bytes, but a dict may be used again and again

    def find_class(self, module: str, name: str) -> _Name | _Function:
        """Look up a name in the table; refuse all others."""
        text = f"{module}.{name}"
        if text in FUNCTIONS:
            return FUNCTIONS[text]
        if module.startswith("deepspeed.") or text in TYPES:
            return _Name(text)
        raise ValueError(f"it uses {shorten(one_line(text), 80)}, which jzero does not run")

    def persistent_load(self, pid: Pickled) -> _Storage:
        """Find a storage."""
        _, kind, key, _, numel = pid
        if type(key) is not str or type(numel) is not int:  # the text of tuples in tuples doubles with each
            raise ValueError("a storage has a name that is no text, or a size that is no whole number")
        dtype, entry = DTYPES[kind.text.removeprefix("torch.")], self._storages[f"data/{key}"]
        if numel * dtype.itemsize > entry.size:
            raise ValueError(f"storage {key} has {entry.size} bytes, not {numel} numbers: it is truncated")
        return _Storage(entry, dtype, self._path)

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack[-1]
        if type(args) is not tuple:
            raise ValueError("it calls a function without a tuple of arguments")
        if isinstance(function, _Name):  # an enumeration, such as the ZeRO stage: its value
            self.stack[-1] = Record(function.text, {"value": args[0] if args else None})
        elif isinstance(function, _Function):
            self.stack[-1] = function.call(*args)
        else:
            raise ValueError("it calls something that is no function")

    def _new(self) -> None:
        _, kind = self.stack.pop(), self.stack[-1]
        if not isinstance(kind, _Name):
            raise ValueError("it makes an instance of something that is no class of DeepSpeed")
        self.stack[-1] = Record(kind.text, {})

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, Record) and type(state) is dict:
            self._left -= len(state)
            if self._left < 0:
                raise ValueError("it sets more attributes than it contains")
            made.fields.update(state)
        elif type(made) is not dict:  # the attributes of a state_dict: {"_metadata": ...}
            raise ValueError("it sets attributes of something that has none")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _fill(self.stack[-1], [key, value])

    def _set_items(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], items)


OWN = {"REDUCE": "_reduce", "NEWOBJ": "_new", "BUILD": "_build", "SETITEM": "_set_item", "SETITEMS": "_set_items"}
_Reader.dispatch = {getattr(pickle, name)[0]: _Reader.__mro__[1].dispatch[getattr(pickle, name)[0]] for name in PLAIN}
_Reader.dispatch |= {getattr(pickle, name)[0]: getattr(_Reader, own) for name, own in OWN.items()}
