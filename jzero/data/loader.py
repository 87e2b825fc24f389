"""The data loader: puts micro-batches on the devices ahead of time, and has a position that can be saved."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jzero.data.mixture import Mixture
from jzero.data.order import ENDLESS, Position, other_data
from jzero.data.sources import as_source, length_of, too_few
from jzero.data.stream import Prefetcher, StreamSpec, micro_batches
from jzero.errors import ConfigError
from jzero.step.batch import place_batch, rows_of_this_process
from jzero.tree import PyTree

if TYPE_CHECKING:
    from jzero.step.train_step import TrainStep


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
        self._at, self._resumes = Position(), True
        self._ahead: Prefetcher[tuple[PyTree, Position]] | None = None  # None before the first batch and after `seek`
        self._sizes = (0, 0)  # of `_ahead`: samples per micro-batch, per global batch
        if (samples := length_of(self.source)) is not None:
            if not len(self):
                raise ConfigError(too_few(samples, step.batch_sizes.train))
            if (train := step.batch_sizes.train) > (most := max(2**20, 1000 * samples)):  # before memory is allocated
                raise ConfigError(
                    f"train_batch_size = {train}: training_data has {samples} samples, which one batch would repeat "
                    f"over and over; use at most {most}"
                )

    def __len__(self) -> int:
        """Return the number of micro-batches in an epoch."""
        if (samples := length_of(self.source)) is None:
            raise TypeError("this training data has no length")
        return Position().end(samples, self.step.batch_sizes.train, self.drop_last) // self.step.micro_size

    def __repr__(self) -> str:
        samples = length_of(self.source)
        kind = repr(self.source) if self._in_order else "samples" if samples is None else f"{samples} samples"
        of = f"{self.step.batch_sizes.train} in micro-batches of {self.step.micro_size}"
        return f"DataLoader({kind}, global batches of {of}, at {self.position})"

    @property
    def position(self) -> dict[str, int]:
        """The position after the last batch returned, for JSON: {"epoch", "samples"}. Prefetched batches do not count.

        Inside a global batch it also has "begun": how many samples of that batch were returned.
        """
        return self._at.to_json()

    @property
    def order(self) -> dict[str, Any]:
        """The settings a position depends on, for JSON: under other values it would point at another sample."""
        samples = length_of(self.source)
        is_shuffled = self.shuffle and not self._in_order and samples is not None
        own = {"order": repr(self.source)} if self._in_order else {}
        return {"samples": samples, "seed": self.seed if is_shuffled else None, "drop_last": self.drop_last, **own}

    @property
    def seen(self) -> dict[str, dict[str, float]] | None:
        """The share that the batches up to the position took of each source of a `Mixture`; None for other data."""
        return self.source.seen(self.position) if isinstance(self.source, Mixture) else None

    @property
    def _in_order(self) -> bool:
        return getattr(self.source, "in_order", False)

    def report_notes(self) -> list[str]:
        """Return what the data say about themselves, for the run report."""
        notes: list[str] = getattr(self.source, "report_notes", list)()
        samples, train = length_of(self.source), self.step.batch_sizes.train
        if samples is not None and samples < train:
            notes = [*notes, f"{samples} samples are fewer than train_batch_size {train}: a step repeats some"]
        if self.seen and self._at.samples + self._at.epoch:
            notes.append("read so far: " + ", ".join(f"{n} {x['samples']:,} samples" for n, x in self.seen.items()))
        return notes

    def seek(self, position: dict[str, int]) -> None:
        """Continue from `position`, which may be from any layout and batch size; running iterators continue there too.

        Data without a length is read and skipped up to the position.

        Raises:
          ConfigError: not a position, or a position outside this data.
        """
        at, samples = Position.from_json(position), length_of(self.source)
        if samples is not None and at.samples - at.begun >= max(1, samples):
            raise ConfigError(other_data(at, samples))
        self._stop()
        self._at, self._resumes = at, True

    def first(self) -> PyTree | None:
        """Return a first micro-batch, for its shapes; nothing moves on. None for data without a length."""
        return None if length_of(self.source) is None else next(self._batches())[0]

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
        if self._ahead is None or self._sizes != sizes:
            self._stop()
            self._ahead, self._sizes = Prefetcher(self._batches()), sizes
        try:
            batch, self._at = next(self._ahead)
        except StopIteration:
            raise
        except BaseException as error:
            self._stop()
            self._resumes = True
            if isinstance(error, SystemExit):
                sys.exit(error.code)  # tells joining.py the code, which `raise` would not
            raise
        self._resumes = False
        return batch

    def _batches(self) -> Iterator[tuple[PyTree, Position]]:
        sharding, micro, train = self.step.batch_sharding, self.step.micro_size, self.step.batch_sizes.train
        spec = StreamSpec(
            self.source, self.seed if self.shuffle else None, self.drop_last, micro, train,
            mine=rows_of_this_process(sharding, micro), put=lambda rows: place_batch(rows, sharding, micro),
        )  # fmt: skip
        return micro_batches(spec, self._at)

    def _stop(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._ahead = None


def steps_per_epoch(data: Any, train_batch_size: int, drop_last: bool = False) -> int:
    """Return the number of global batches in an epoch of training data; 0 if it has no length or no end.

    >>> steps_per_epoch([1, 2, 3], 2), steps_per_epoch(lambda: iter([1]), 2)
    (2, 0)
    """
    samples = length_of(as_source(data))
    if samples is None or samples >= ENDLESS:
        return 0
    return Position().end(samples, train_batch_size, drop_last) // train_batch_size


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
