"""The data loader: puts micro-batches on the devices ahead of time, and has a position that can be saved."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jzero.batch import place_batch, rows_of_this_process
from jzero.data.mixture import Mixture
from jzero.data.order import ENDLESS, Position, other_data
from jzero.data.sources import Escaped, IterableStyle, as_source, check_fill, too_few
from jzero.errors import ConfigError
from jzero.tree import PyTree

if TYPE_CHECKING:
    from grain import DatasetIterator

    from jzero.train_step import TrainStep


class DataLoader:
    """Iterates over micro-batches of all replicas (leading dimension micro x replicas), sharded as the step expects.

    One iteration is one epoch, a whole number of global batches, in a new order each time; a `for` after a `break`
    starts the next epoch. Each process reads only its own rows (or, of data without a length, all rows), in a thread
    that runs `jzero.data.stream.PREFETCH` micro-batches ahead. The seed, the epoch and the sample's index determine
    the order; the layout and the number of processes do not affect it.

    Args:
      data: see `jzero.data.sources`.
      step: the `TrainStep` to feed; when its batch sizes change, the loader uses the new ones.
      seed: of the shuffle.
      shuffle: False keeps the data's own order. Data without a length is never shuffled.
      drop_last: skip samples that do not fill a global batch, instead of filling it with the epoch's first samples.

    Raises:
      ConfigError: unsuitable data. Errors in reading are raised by the iteration, which can then be retried.

    >>> import jax, jzero, numpy as np
    >>> from flax import nnx
    >>> net = jzero.from_flax(lambda rngs: nnx.Linear(1, 1, rngs=rngs), lambda m, x: m(x).mean())
    >>> sgd = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    >>> step = jzero.make_train_step(net, sgd, mesh=jzero.make_mesh(devices=jax.devices()[:2]))
    >>> loader = DataLoader(np.arange(10.0)[:, None], step, shuffle=False)
    >>> [x.ravel().tolist() for x in loader]
    [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 0.0, 1.0]]
    >>> loader.position
    {'epoch': 1, 'samples': 0}
    """

    def __init__(self, data: Any, step: TrainStep, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False):
        self.source, self.step = as_source(data), step
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self._at, self._resumes, self._ended = Position(), True, False
        self._streams: list[DatasetIterator] = []  # the running one; empty before the first batch and after `seek`
        self._sizes = (0, 0)  # of the stream: samples per micro-batch, per global batch
        if not isinstance(self.source, IterableStyle):
            if not len(self):
                raise ConfigError(too_few(len(self.source), step.batch_sizes.train))
            check_fill(len(self.source), step.batch_sizes.train)

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch."""
        if isinstance(self.source, IterableStyle):
            raise TypeError("this training data has no length")
        return Position().end(len(self.source), self.step.batch_sizes.train, self.drop_last) // self.step.micro_size

    def __repr__(self) -> str:
        samples = "samples" if isinstance(self.source, IterableStyle) else f"{len(self.source)} samples"
        samples = repr(self.source) if self._in_order else samples
        of = f"{self.step.batch_sizes.train} in micro-batches of {self.step.micro_size}"
        return f"DataLoader({samples}, global batches of {of}, at {self.position})"

    @property
    def position(self) -> dict[str, int]:
        """The position after the last batch returned, for JSON: {"epoch", "samples"}. Prefetched batches do not count.

        Inside a global batch it also has "begun": how many samples of that batch were returned.
        """
        return self._at.to_json()

    @property
    def order(self) -> dict[str, Any]:
        """The settings a position depends on, for JSON: under other values it would point at another sample."""
        if isinstance(self.source, IterableStyle):  # never shuffled, so the seed does not matter
            return {"samples": None, "seed": None, "drop_last": self.drop_last}
        seed = self.seed if self.shuffle and not self._in_order else None
        own = {"order": repr(self.source)} if self._in_order else {}
        return {"samples": len(self.source), "seed": seed, "drop_last": self.drop_last, **own}

    @property
    def seen(self) -> dict[str, dict[str, float]] | None:
        """What the batches up to the position took of each source of a `Mixture`; None for other data."""
        return self.source.seen(self.position) if isinstance(self.source, Mixture) else None

    @property
    def _in_order(self) -> bool:
        return getattr(self.source, "in_order", False)

    def report_notes(self) -> list[str]:
        """Return what the data say about themselves, for the run report."""
        notes: list[str] = getattr(self.source, "report_notes", list)()
        if self.seen and self._at.samples + self._at.epoch:
            notes.append("read so far: " + ", ".join(f"{n} {x['samples']:,} samples" for n, x in self.seen.items()))
        return notes

    def seek(self, position: dict[str, int]) -> None:
        """Continue from `position`, which may be from any layout and batch size; running iterators continue there too.

        Data without a length is read and skipped up to the position.

        Raises:
          ConfigError: not a position, or a position outside this data.
        """
        at = Position.from_json(position)
        if not isinstance(self.source, IterableStyle) and (at.samples - at.begun) >= max(1, len(self.source)):
            raise ConfigError(other_data(at, len(self.source)))
        self._stop()
        self._at, self._resumes, self._ended = at, True, False

    def first(self) -> PyTree | None:
        """Return a first micro-batch, for its shapes; nothing moves on. None for data without a length."""
        if isinstance(self.source, IterableStyle):
            return None
        other = copy.copy(self)
        other._streams = []
        try:
            return other._next()
        finally:
            other._stop()

    def __iter__(self) -> Iterator[PyTree]:
        """Iterate over one epoch: the rest of the current one at first and after `seek`, else the next."""
        if self._at.samples and not self._resumes:
            self._stop()
            self._at = Position(self._at.epoch + 1)
        while True:
            try:
                batch = self._next()
            except StopIteration:
                return
            yield batch
            if not self._at.samples and not self._resumes:
                return

    def _next(self) -> PyTree:
        """Return the next micro-batch, from this epoch or the next."""
        sizes = self.step.micro_size, self.step.batch_sizes.train
        if self._ended:
            raise StopIteration
        if not self._streams or self._sizes != sizes:
            self._start(*sizes)
        try:
            batch = next(self._streams[0])
        except StopIteration:
            self._ended = True
            raise
        except BaseException as error:
            self._stop()
            self._resumes = True
            if isinstance(error, Escaped) and isinstance(error.__cause__, SystemExit):
                sys.exit(error.__cause__.code)  # tells joining.py the code, which `raise` would not
            if isinstance(error, Escaped) and error.__cause__:
                raise error.__cause__ from None
            raise
        self._at, self._resumes = Position(**self._streams[0].get_state()), False
        return batch

    def _start(self, micro: int, train: int) -> None:
        from jzero.data.stream import StreamSpec, stream  # here, because importing grain takes a second

        self._stop()
        sharding = self.step.batch_sharding
        spec = StreamSpec(
            self.source, self.seed if self.shuffle else None, self.drop_last, micro, train,
            mine=rows_of_this_process(sharding, micro), put=lambda rows: place_batch(rows, sharding, micro),
        )  # fmt: skip
        self._streams, self._sizes = [stream(spec, self._at)], (micro, train)
        # Stop the thread with the loader or at Python's exit: a thread inside C++ at exit aborts the process.
        self._end = weakref.finalize(self, _end, self._streams)

    def _stop(self) -> None:
        if self._streams:
            self._end()


def _end(streams: list[DatasetIterator]) -> None:
    while streams:
        streams.pop().close()


def steps_per_epoch(data: Any, train_batch_size: int, drop_last: bool = False) -> int:
    """Return the number of global batches in an epoch of training data; 0 if it has no length or no end.

    >>> steps_per_epoch([1, 2, 3], 2), steps_per_epoch(lambda: iter([1]), 2)
    (2, 0)
    """
    source = as_source(data)
    if isinstance(source, IterableStyle) or len(source) >= ENDLESS:
        return 0
    return Position().end(len(source), train_batch_size, drop_last) // train_batch_size


class RepeatingLoader:
    """An endless iterator: restarts its loader whenever it ends.

    >>> loader = RepeatingLoader([1, 2])
    >>> [next(loader) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable[PyTree]):
        self.loader, self.iterator = loader, iter(loader)

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)
