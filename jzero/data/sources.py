"""The kinds of training data, behind one protocol: a length and `rows`; or, without a length, an iterator of samples.

| data | how it is read |
|---|---|
| a pytree of arrays with one leading sample dimension | a micro-batch by one fancy index per array |
| anything with `__len__` and `rows(indices) -> batch` (a `Source`: `TokenFile`, `Packed`, your own) | by `rows` |
| a Hugging Face `Dataset` | by its batched access, as NumPy |
| anything with `__len__` and `__getitem__` (a list, a PyTorch map-style dataset) | sample by sample, stacked |
| a function that returns an iterator; an iterable (an `IterableDataset`) | sample by sample, in its order |
| an iterator | the same, once |

A list of numbers in a sample becomes an array.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jzero.errors import ConfigError
from jzero.step.batch import host_arrays
from jzero.tree import PyTree, named

FROM_TEXT = "jzero.data.write_tokens makes a file of tokens from text (a JSONL file, a column of a dataset)"


@runtime_checkable
class Source(Protocol):
    """Data with a length whose samples are read by index, many at once.

    If an attribute `in_order` is true, the data have an order of their own: the loader does not shuffle, and reads the
    samples 0, 1, 2, ..., with numbers that go on in the next epoch; `repr` then tells two orders apart. The run report
    has the lines that a method `report_notes()` returns.
    """

    def __len__(self) -> int: ...
    def rows(self, indices: np.ndarray) -> PyTree:
        """Read samples as a batch: a pytree of NumPy arrays [len(indices), ...]. The prefetch thread calls it."""
        ...


def as_source(data: Any) -> Source | Iterated:
    """Wrap training data of any kind in the table above.

    Raises:
      ConfigError: empty data, arrays of different lengths, or an unsupported kind.
    """
    if isinstance(data, str | os.PathLike):
        raise ConfigError(
            f"training_data = {str(data)!r}: to read a file of tokens, pass jzero.data.TokenFile(path, sequence) or "
            f"jzero.data.Packed(path, length); {FROM_TEXT}"
        )
    if isinstance(data, getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())):
        raise ConfigError(
            "training_data is a torch DataLoader, whose items are batches: pass its dataset (loader.dataset), or loop "
            "over the loader and pass its batches to the engine"
        )
    if not isinstance(data, list):
        data = host_arrays(data)
    if isinstance(data, Source):
        source: Source = data
    elif isinstance(data, Iterator):
        return Iterated(data)
    elif hasattr(data, "with_format") and hasattr(data, "format") and hasattr(data, "__len__"):
        source = _hugging_face(data) if data.format["type"] != "custom" else _sequence(data)
    elif isinstance(data, dict | tuple | np.ndarray | jax.Array) or _is_node(data):
        source = _arrays(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        source = _sequence(data)
    elif isinstance(data, Iterable) or callable(data):
        return Iterated(data.with_format("numpy") if hasattr(data, "with_format") else data)
    else:
        raise ConfigError(
            f"training_data is {type(data).__name__}: must be a pytree of arrays, a sequence of samples, a Hugging "
            "Face dataset, an iterable, or a function that returns an iterator"
        )
    if not len(source):
        raise ConfigError("training_data contains no samples")
    return source


def length_of(source: Source | Iterated) -> int | None:
    """Return the number of samples; None for data without a length."""
    return None if isinstance(source, Iterated) else len(source)


def _is_node(data: object) -> bool:
    """Return whether JAX sees `data` as a pytree with children, such as a registered dataclass."""
    return not isinstance(data, list) and not jax.tree.all(jax.tree.map(lambda x: x is data, data))


@dataclass(frozen=True, repr=False)
class Indexed:
    """Samples that a function reads by their indices."""

    data: Sized
    rows: Callable[[np.ndarray], PyTree]

    def __len__(self) -> int:
        return len(self.data)


def _arrays(data: Any) -> Indexed:
    """Read a pytree of arrays, memory-mapped or not, with one leading sample dimension."""
    for path, x in jax.tree_util.tree_flatten_with_path(data)[0]:
        if not hasattr(x, "shape") or not hasattr(x, "dtype") or not x.shape:
            raise ConfigError(
                f"training_data{jax.tree_util.keystr(path)} is {type(x).__name__}; expected an array with a "
                "leading sample dimension (if this is a dict of splits, pass one split)"
            )
    data = jax.tree.map(np.asarray, data)
    leaves = jax.tree.leaves(data)
    if len(lengths := {len(x) for x in leaves}) > 1:
        raise ConfigError(f"training_data: its arrays have {sorted(lengths)} samples; all must have the same number")
    check_numbers(data)
    return Indexed(leaves[0] if leaves else (), lambda indices: jax.tree.map(lambda x: x[indices], data))


def _sequence(data: Any) -> Indexed:
    """Read samples one by one: each is a pytree of arrays with the same structure and shapes."""
    return Indexed(
        data, lambda indices: collate([read_sample(i, partial(data.__getitem__, i)) for i in indices.tolist()])
    )


def _hugging_face(data: Any) -> Indexed:
    """Read a `Dataset`: its selected columns, which must hold numbers and have one shape in all samples."""
    some = None if data.format["output_all_columns"] else data.format["columns"]
    data = data.with_format("numpy", columns=some)

    def rows(indices: np.ndarray) -> PyTree:
        batch = data[indices.tolist()]
        fix = "; select columns of numbers (dataset.select_columns) of one length (pad, truncate or pack)"
        check_numbers(batch, fix)
        return batch

    return Indexed(data, rows)


class Iterated:
    """Data without a length: an iterable, an iterator or a function. Every process reads all samples, keeps its own."""

    def __init__(self, data: Any):
        self.data, self.once, self.started = data, isinstance(data, Iterator), False

    def start(self, epoch: int) -> Iterator[PyTree]:
        """Start an epoch at its first sample.

        Raises:
          ConfigError: the data is an iterator and was already started.
        """
        if self.once and self.started:
            raise ConfigError(
                "training_data is an iterator, which can be read only once: to go back or to change the batch size, "
                "pass a function that returns an iterator, or an iterable"
            )
        self.started = True
        if hasattr(self.data, "set_epoch"):  # Hugging Face's IterableDataset shuffles by epoch
            self.data.set_epoch(epoch)
        return iter(self.data() if callable(self.data) and not isinstance(self.data, Iterable) else self.data)


def read_sample(number: int, read: Callable[[], PyTree]) -> PyTree:
    """Call `read` and add the sample's number as a note to its exceptions."""
    try:
        return read()
    except Exception as error:
        error.add_note(f"while reading sample {number} of training_data")
        raise


def collate(samples: Sequence[PyTree]) -> PyTree:
    """Stack samples into a batch; a list of numbers becomes an array.

    Raises:
      ConfigError: the samples differ in structure or shape.
    """
    try:
        samples = [jax.tree.map(np.asarray, host_arrays(x), is_leaf=_is_numbers) for x in samples]
        batch = jax.tree.map(lambda *xs: np.stack(xs), *samples)
    except ValueError:
        forms = sorted({str(jax.tree.map(np.shape, x)) for x in samples})
        what = f"{len(forms)} shapes" if forms[1:] else "lists of uneven length"
        raise ConfigError(
            f"training_data: samples have {what}, such as {' and '.join(form[:200] for form in forms[:2])}; all must "
            "have the same structure and shape: pad or truncate them, or pack documents with jzero.data.Packed"
        ) from None
    check_numbers(batch)
    return batch


def _is_numbers(x: object) -> bool:
    if not isinstance(x, list):
        return False
    kinds = set(map(type, x))
    if kinds == {list}:
        return all(map(_is_numbers, x))
    return all(issubclass(kind, int | float | np.number | np.bool_) for kind in kinds)


def check_numbers(batch: PyTree, fix: str = "") -> None:
    """Raise a ConfigError for leaves whose dtype no device supports, such as strings and objects."""
    for name, x in named(batch).items():
        dtype = getattr(x, "dtype", None)
        if dtype is None or not any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.number, np.bool_)):
            where = f"training_data[{name!r}]" if name else "training_data"
            fix += f"; {FROM_TEXT}" if getattr(dtype, "kind", "") == "U" else ""
            raise ConfigError(f"{where} has dtype {dtype or type(x).__name__}; expected numbers{fix}")


def too_few(samples: int, train: int) -> str:
    """Word the error message for an epoch without a single global batch."""
    if not samples:
        return "training_data contains no samples"
    return (
        f"training_data: {samples} samples do not fill one global batch of {train} (train_batch_size) and "
        "dataloader_drop_last is true; add data, use a smaller batch or set dataloader_drop_last to false"
    )
