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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jzero.batch import host_arrays
from jzero.errors import ConfigError
from jzero.tree import PyTree, named


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


def as_source(data: Any) -> Source | IterableStyle:
    """Wrap training data of any kind in the table above.

    Raises:
      ConfigError: empty data, arrays of different lengths, or an unsupported kind.
    """
    if isinstance(data, str | os.PathLike):
        raise ConfigError(
            f"training_data = {str(data)!r}: to read a file of tokens, pass jzero.data.TokenFile(path, sequence) or "
            "jzero.data.Packed(path, length)"
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
        return IterableStyle(data)
    elif hasattr(data, "with_format") and hasattr(data, "format") and hasattr(data, "__len__"):
        source = HuggingFace(data) if data.format["type"] != "custom" else MapStyle(data)
    elif isinstance(data, dict | tuple | np.ndarray | jax.Array) or _is_node(data):
        source = Arrays(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        source = MapStyle(data)
    elif isinstance(data, Iterable) or callable(data):
        return IterableStyle(data.with_format("numpy") if hasattr(data, "with_format") else data)
    else:
        raise ConfigError(
            f"training_data is {type(data).__name__}: must be a pytree of arrays, a sequence of samples, a Hugging "
            "Face dataset, an iterable, or a function that returns an iterator"
        )
    if not len(source):
        raise ConfigError("training_data contains no samples")
    return source


def _is_node(data: Any) -> bool:
    """Return whether JAX sees `data` as a pytree with children, such as a registered dataclass."""
    return not isinstance(data, list) and not jax.tree.all(jax.tree.map(lambda x: x is data, data))


class Escaped(Exception):
    """Carries what a source raised beside Exceptions, such as SystemExit, out of the prefetch thread as its cause."""


class Arrays:
    """A pytree of arrays, memory-mapped or not, with one leading sample dimension."""

    def __init__(self, data: Any):
        for path, x in jax.tree_util.tree_flatten_with_path(data)[0]:
            if not hasattr(x, "shape") or not hasattr(x, "dtype") or not x.shape:
                raise ConfigError(
                    f"training_data{jax.tree_util.keystr(path)} is {type(x).__name__}; expected an array with a "
                    "leading sample dimension (if this is a dict of splits, pass one split)"
                )
        self.data = jax.tree.map(np.asarray, data)
        lengths = {len(x) for x in jax.tree.leaves(self.data)}
        if len(lengths) > 1:
            raise ConfigError(
                f"training_data: its arrays have {sorted(lengths)} samples; all must have the same number"
            )
        self.length = max(lengths, default=0)
        check_numbers(self.data)

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: np.ndarray) -> PyTree:
        return jax.tree.map(lambda x: x[indices], self.data)


class MapStyle:
    """A sequence of samples; every sample is a pytree of arrays with the same structure and shapes."""

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, indices: np.ndarray) -> PyTree:
        return collate([read_sample(i, partial(self.data.__getitem__, i)) for i in indices.tolist()])


class HuggingFace:
    """A Hugging Face `Dataset`: its selected columns, which must hold numbers and have one shape in all samples."""

    def __init__(self, data: Any):
        some = None if data.format["output_all_columns"] else data.format["columns"]
        self.data = data.with_format("numpy", columns=some)

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, indices: np.ndarray) -> PyTree:
        batch = self.data[indices.tolist()]
        check_numbers(
            batch, "; select columns of numbers (dataset.select_columns) of one length (pad, truncate or pack)"
        )
        return batch


class IterableStyle:
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


def _is_numbers(x: Any) -> bool:
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
            raise ConfigError(f"{where} has dtype {dtype or type(x).__name__}; expected numbers{fix}")


def check_fill(samples: int, train: int) -> None:
    """Raise a ConfigError for a batch that is absurdly larger than the data, before memory for it is allocated."""
    if train > (most := max(2**20, 1000 * samples)):
        raise ConfigError(
            f"train_batch_size = {train}: training_data has {samples} samples, which one batch would repeat over and "
            f"over; use at most {most}"
        )


def too_few(samples: int, train: int) -> str:
    """Word the error message for an epoch without a single global batch."""
    if not samples:
        return "training_data contains no samples"
    return (
        f"training_data: {samples} samples do not fill one global batch of {train} (train_batch_size) and "
        "dataloader_drop_last is true; add data, use a smaller batch or set dataloader_drop_last to false"
    )
