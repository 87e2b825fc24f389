"""What training data may be, behind one protocol: a length and rows; or, without a length, samples one by one.

| data | how it is read |
|---|---|
| a pytree of arrays, one leading sample dimension | a micro-batch by one fancy index per array |
| anything with `__len__` and `rows(indices) -> batch` (a `Source`: `TokenFile`, `Packed`, your own) | as it likes |
| a Hugging Face `Dataset` | its batched access, as NumPy |
| anything with `__len__` and `__getitem__` (a list, PyTorch's map-style datasets) | sample by sample, stacked |
| a function that makes an iterator; what can be iterated over (an `IterableDataset`) | sample by sample, in its order |
| an iterator | the same, once |

A list of numbers in a sample is an array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jzero.errors import ConfigError
from jzero.tree import named


@runtime_checkable
class Source(Protocol):
    """Samples that are read by number, many at once."""

    def __len__(self) -> int: ...
    def rows(self, indices: np.ndarray) -> Any:
        """The batch [len(indices), ...] of these samples, a pytree of NumPy arrays. Called from one other thread."""
        ...


def as_source(data: Any) -> Source | Samples:
    """See the table above.

    Raises:
      ConfigError: data in which there is nothing, arrays of different length, or what is none of the above.
    """
    if isinstance(data, str | os.PathLike):
        raise ConfigError(
            f"training_data = {str(data)!r}: a file is read by jzero.data.TokenFile(path, sequence) or Packed"
        )
    if isinstance(data, Source):
        source: Source = data
    elif isinstance(data, Iterator):
        return Samples(data)
    elif hasattr(data, "with_format") and hasattr(data, "format") and hasattr(data, "__len__"):
        source = HuggingFace(data) if data.format["type"] != "custom" else Sampled(data)
    elif isinstance(data, dict | tuple | np.ndarray | jax.Array) or _is_node(data):
        source = Arrays(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        source = Sampled(data)
    elif isinstance(data, Iterable) or callable(data):
        return Samples(data.with_format("numpy") if hasattr(data, "with_format") else data)
    else:
        raise ConfigError(
            f"training_data is {type(data).__name__}: must be a pytree of arrays, a sequence of samples, a Hugging "
            "Face dataset, something to iterate over, or a function that makes an iterator"
        )
    if not len(source):
        raise ConfigError("training_data: there are no samples in it")
    return source


def _is_node(data: Any) -> bool:
    return not isinstance(data, list) and not jax.tree.all(jax.tree.map(lambda x: x is data, data))


class Arrays:
    """A pytree of arrays (memory-mapped ones too) with one leading sample dimension."""

    def __init__(self, data: Any):
        for path, x in jax.tree_util.tree_flatten_with_path(data)[0]:
            if not hasattr(x, "shape") or not hasattr(x, "dtype") or not x.shape:
                raise ConfigError(
                    f"training_data{jax.tree_util.keystr(path)} is {type(x).__name__}, no array of samples: give "
                    "arrays with one leading sample dimension (of a dict of splits choose one)"
                )
        self.data = jax.tree.map(np.asarray, data)
        lengths = {len(x) for x in jax.tree.leaves(self.data)}
        if len(lengths) > 1:
            raise ConfigError(f"training_data: its arrays have {sorted(lengths)} samples; they must all have as many")
        self.length = max(lengths, default=0)
        check_numbers(self.data)

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: np.ndarray) -> Any:
        return jax.tree.map(lambda x: x[indices], self.data)


class Sampled:
    """A sequence of samples, each a pytree of arrays of one shape."""

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, indices: np.ndarray) -> Any:
        return stack([noted(i, partial(self.data.__getitem__, i)) for i in indices.tolist()])


class HuggingFace:
    """A Hugging Face `Dataset`: the columns it has now, each of numbers, and of one shape in all samples."""

    def __init__(self, data: Any):
        some = None if data.format["output_all_columns"] else data.format["columns"]
        self.data = data.with_format("numpy", columns=some)

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, indices: np.ndarray) -> Any:
        batch = self.data[indices.tolist()]
        check_numbers(
            batch, "; choose columns of numbers (dataset.select_columns), each of one length (pad, cut, pack)"
        )
        return batch


class Samples:
    """Samples of which only the next can be read. Every process reads all of them and keeps its own."""

    def __init__(self, data: Any):
        self.data, self.once, self.started = data, isinstance(data, Iterator), False

    def start(self, epoch: int) -> Iterator[Any]:
        """The samples of an epoch, from the first on.

        Raises:
          ConfigError: an iterator, for the second time.
        """
        if self.once and self.started:
            raise ConfigError(
                "training_data is an iterator, which is read once: give a function that makes one (or an object that "
                "can be iterated over again) to go back in it, or to change the batch size"
            )
        self.started = True
        if hasattr(self.data, "set_epoch"):  # Hugging Face's: another order
            self.data.set_epoch(epoch)
        return iter(self.data() if callable(self.data) and not isinstance(self.data, Iterable) else self.data)


def noted(number: int, read: Callable[[], Any]) -> Any:
    """read(), of whose errors it is said which sample they are about."""
    try:
        return read()
    except Exception as error:
        error.add_note(f"while reading sample {number} of training_data")
        raise


def stack(samples: Sequence[Any]) -> Any:
    """A batch of samples of one structure and shape; a list of numbers is an array.

    Raises:
      ConfigError: of several.
    """
    try:
        samples = [jax.tree.map(np.asarray, x, is_leaf=_is_numbers) for x in samples]
        batch = jax.tree.map(lambda *xs: np.stack(xs), *samples)
    except ValueError:
        forms = sorted({str(jax.tree.map(np.shape, x)) for x in samples})
        what = f"of {len(forms)} forms" if forms[1:] else "with lists of uneven length"
        raise ConfigError(
            f"training_data: samples {what}, such as {' and '.join(form[:200] for form in forms[:2])}: all must "
            "have one structure and shape; pad or cut them, or pack documents into rows with jzero.data.Packed"
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


def check_numbers(batch: Any, fix: str = "; give arrays of numbers") -> None:
    """Raise a ConfigError for leaves that no device can hold."""
    for name, x in named(batch).items():
        dtype = getattr(x, "dtype", None)
        if dtype is None or not any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.number, np.bool_)):
            raise ConfigError(f"training_data: {name or 'it'} holds {dtype or type(x).__name__}, no numbers{fix}")


def too_few(samples: int, train: int) -> str:
    """What to say of an epoch without a global batch."""
    if not samples:
        return "training_data: there are no samples in it"
    return (
        f"training_data: {samples} samples do not fill one global batch of {train} (train_batch_size) and "
        "dataloader_drop_last is true; add data or make the batch smaller"
    )
