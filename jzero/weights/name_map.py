"""Maps a model's leaves to the tensors of a file and back, by a table.

A model's leaves (`stack.attention.qkv.kernel`, with the layer axis first) and the tensors of a file
(`model.layers.3.self_attn.q_proj.weight`) divide the same numbers differently. A model may have a method
`weights_layout()` that returns the mapping as JSON data:

    {"config": {...}, "may_differ": [keys of it], "absent": {...}, "ignored": [patterns], "tensors": [
        {"name": "model.layers.{layer}.self_attn.q_proj.weight", "leaf": "stack/attention/qkv/kernel",
         "columns": [0, 2048], "transposed": true}, ...]}

tensors   A row with `{layer}` in its name describes one tensor per layer. `columns` is a range of the leaf's last
          dimension (default: all of it). A transposed tensor is stored as [columns, rows].
config    Written to config.json. Files whose config.json differs belong to another model, except for the keys in
          `may_differ`. Entries of nested dictionaries are compared individually too.
absent    The values that missing keys of config.json stand for.
ignored   Name patterns (* matches anything) of tensors that are not read.

Without a table, every leaf is one tensor of the same name.

Export and import are one operation in two directions: `Tensor.overlap` finds, for a box of a leaf, the part of each
tensor that it contains. Neither direction ever needs a whole leaf or tensor in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jzero.errors import ConfigError, some_of
from jzero.tree import PyTree, named

Box = tuple[slice, ...]  # part of an array: start and stop in every dimension
KEYS = {"name", "leaf", "columns", "transposed"}


class ShapeDtype(NamedTuple):
    """The shape and dtype of a leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, which is the part `leaf[layer][..., columns]` of a leaf, transposed or not.

    >>> q = Tensor("q", "stack.qkv", (4, 8), np.dtype("f4"), layer=2, columns=(0, 4), transposed=True)
    >>> q.overlap((slice(2, 4), slice(6, 8), slice(1, 9)))  # rows 1 to 3 and columns 6 and 7 of q
    ((slice(1, 4, None), slice(6, 8, None)), (0, slice(0, 2, None), slice(0, 3, None), Ellipsis))
    >>> q.overlap((slice(3, 4), slice(0, 8), slice(0, 12)))
    """

    name: str
    leaf: str
    shape: tuple[int, ...]
    dtype: np.dtype
    layer: int | None = None
    columns: tuple[int, int] | None = None
    transposed: bool = False

    def overlap(self, box: Box) -> tuple[Box, tuple] | None:
        """Intersect the tensor with a box of its leaf; None if they do not overlap.

        Returns:
          (box of the tensor, index into an array of the box's values); that array, indexed and `oriented`, has the
          shape of the tensor's box.
        """
        inner: tuple[Any, ...] = ()
        if self.layer is not None:
            if not box[0].start <= self.layer < box[0].stop:
                return None
            inner, box = (self.layer - box[0].start,), box[1:]
        own = list(box)
        local = [slice(0, s.stop - s.start) for s in box]
        if self.columns is not None:
            first, last = self.columns
            start, stop = max(first, box[-1].start), min(last, box[-1].stop)
            own[-1], local[-1] = slice(start - first, stop - first), slice(start - box[-1].start, stop - box[-1].start)
        if any(s.stop <= s.start for s in own):
            return None
        return tuple(own[::-1] if self.transposed else own), (*inner, *local, ...)

    def oriented(self, values: np.ndarray) -> np.ndarray:
        """Return a view of part of the leaf in the tensor's orientation."""
        return values.T if self.transposed else values

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def assign(target: np.ndarray, source: np.ndarray) -> None:
    """Copy source to target. A transposing copy goes sixteen rows at a time, four times as fast as NumPy's own."""
    if target.ndim != 2 or all(x.strides[1] == x.itemsize for x in (target, source)):
        target[...] = source
        return
    for i in range(0, len(target), 16):
        target[i : i + 16] = source[i : i + 16]


def dotted(name: str) -> str:
    """Return the name of a leaf in checkpoints and files: `stack/mlp/down/kernel` -> `stack.mlp.down.kernel`."""
    return name.replace("/", ".") or "params"


def leaves_of(params: PyTree) -> dict[str, ShapeDtype]:
    """Map dotted names to shapes and dtypes, for a tree of arrays or ShapeDtypeStructs."""
    return {dotted(name): ShapeDtype(x.shape, x.dtype) for name, x in named(params).items()}


def tensors(leaves: Mapping[str, ShapeDtype], table: Mapping[str, Any] | None) -> list[Tensor]:
    """List the tensors of a model, layer by layer; without a table, one per leaf.

    Args:
      leaves: by dotted name.
      table: the model's `weights_layout()`.

    Raises:
      ConfigError: the table names a leaf that does not exist, omits part of a leaf or names a part twice.
    """
    if table is None:
        return [Tensor(name, name, x.shape, x.dtype) for name, x in leaves.items()]
    rows = [_Row.read(row, leaves) for row in table["tensors"]]
    made: list[Tensor] = []
    for layers, group in groupby(rows, lambda row: row.layers):
        some = list(group)
        made += [row.tensor(layer) for layer in (range(layers) if layers is not None else [None]) for row in some]
    for leaf, x in leaves.items():
        width = x.shape[-1] if x.shape else 1
        parts = sorted(row.columns or (0, width) for row in rows if row.leaf == leaf)
        if [0, *(stop for _, stop in parts)] != [*(start for start, _ in parts), width]:
            raise ConfigError(f"weights_layout: its rows omit, or name twice, a part of {leaf} {x.shape}")
    names = Counter(tensor.name for tensor in made)
    if twice := [name for name, times in names.items() if times > 1]:
        raise ConfigError(f"weights_layout: two tensors have the name {some_of(twice)}")
    return made


class _Row(NamedTuple):
    name: str
    leaf: str
    array: ShapeDtype
    layers: int | None
    columns: tuple[int, int] | None
    transposed: bool

    @classmethod
    def read(cls, row: Mapping[str, Any], leaves: Mapping[str, ShapeDtype]) -> _Row:
        leaf, stacked = dotted(row["leaf"]), "{layer}" in row["name"]
        if unknown := row.keys() - KEYS:
            raise ConfigError(
                f"weights_layout: {row['name']} has unknown keys {sorted(unknown)}; allowed: {sorted(KEYS)}"
            )
        if leaf not in leaves:
            raise ConfigError(
                f"weights_layout: {row['name']} names the leaf {leaf}, but the leaves are {some_of(leaves)}"
            )
        shape, columns, transposed = leaves[leaf].shape, row.get("columns"), row.get("transposed", False)
        if len(shape) - stacked < (2 if transposed else 1 if columns else 0):
            raise ConfigError(f"weights_layout: {row['name']} needs more dimensions than {leaf} {shape} has")
        fits = columns is None or 0 <= columns[0] < columns[1] <= shape[-1]
        if not fits:
            raise ConfigError(f"weights_layout: {row['name']} has columns {columns}, outside {leaf} {shape}")
        layers = shape[0] if stacked else None
        return cls(row["name"], leaf, leaves[leaf], layers, tuple(columns) if columns else None, transposed)

    def tensor(self, layer: int | None) -> Tensor:
        shape = self.array.shape if layer is None else self.array.shape[1:]
        if self.columns:
            shape = (*shape[:-1], self.columns[1] - self.columns[0])
        shape = shape[::-1] if self.transposed else shape
        name = self.name if layer is None else self.name.format(layer=layer)
        return Tensor(name, self.leaf, shape, self.array.dtype, layer, self.columns, self.transposed)


def with_dtype(some: Iterable[Tensor], dtype: np.dtype | None) -> list[Tensor]:
    """Give all floating-point tensors one dtype; None: the widest that they have.

    A Hugging Face config.json has one dtype for all of a model's tensors, but frozen parameters are stored in the
    compute dtype and trained ones in that of the masters.
    """
    some = list(some)
    floats = [t.dtype for t in some if jnp.issubdtype(t.dtype, jnp.floating)]
    one: Any = dtype if dtype is not None or not floats else functools.reduce(jnp.promote_types, floats)
    return [dataclasses.replace(t, dtype=one) if jnp.issubdtype(t.dtype, jnp.floating) else t for t in some]
