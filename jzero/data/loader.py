"""The loader: micro-batches of all replicas, on the devices in advance, at a position that can be saved."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jzero.batch import place_batch, rows_of_this_process
from jzero.data.order import Position, other_data
from jzero.data.sources import Samples, as_source, too_few
from jzero.errors import ConfigError

if TYPE_CHECKING:
    from jzero.train_step import TrainStep


class DataLoader:
    """Micro-batches of all replicas (leading dimension micro x replicas), laid out as the step wants them.

    Iterating it is one epoch, a whole number of global batches, in a new order every time; `for` after a `break` begins
    the next one. Each process reads its own rows only (of samples without a length all, and keeps its own), a thread
    `jzero.data.stream.PREFETCH` micro-batches ahead. Which samples come when follows from the seed, the epoch and the
    sample's number in it: not from the layout, not from the number of processes.

    Args:
      data: see `jzero.data.sources`.
      step: the `TrainStep` to feed; its batch sizes are followed when they change.
      seed: of the order.
      shuffle: False for the data's own order, which samples without a length always come in.
      drop_last: leave out the samples that fill no global batch, instead of filling it up from the epoch's start.

    Raises:
      ConfigError: data that does not fit. Errors in reading come out of the iteration, which then can go on there.

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
        self._streams: list[Any] = []  # one, or none before the first batch and after `seek`
        self._sizes = (0, 0)  # of the stream: samples of a micro-batch, of a global batch
        if not isinstance(self.source, Samples) and not len(self):
            raise ConfigError(too_few(len(self.source), step.batch_sizes.train))

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        if isinstance(self.source, Samples):
            raise TypeError("this training data has no length")
        return Position().end(len(self.source), self.step.batch_sizes.train, self.drop_last) // self.step.micro_size

    def __repr__(self) -> str:
        samples = "samples" if isinstance(self.source, Samples) else f"{len(self.source)} samples"
        of = f"{self.step.batch_sizes.train} in micro-batches of {self.step.micro_size}"
        return f"DataLoader({samples}, global batches of {of}, at {self.position})"

    @property
    def position(self) -> dict[str, int]:
        """What has been given out, for JSON: {"epoch", "samples"}; what was read ahead does not count.

        Between the micro-batches of a step it also says how many of its samples were given ("begun").
        """
        return self._at.dump()

    @property
    def order(self) -> dict[str, Any]:
        """What a position supposes, for JSON: with other values another sample is at the same place."""
        if isinstance(self.source, Samples):  # in their own
            return {"samples": None, "seed": None, "drop_last": self.drop_last}
        seed = self.seed if self.shuffle else None
        return {"samples": len(self.source), "seed": seed, "drop_last": self.drop_last}

    def seek(self, position: dict[str, int]) -> None:
        """Go on from `position`, whatever layout and batch size it is from; running iterators do too.

        Samples without a length are read and skipped up to there.

        Raises:
          ConfigError: what is no position, or not in this data.
        """
        at = Position.load(position)
        if not isinstance(self.source, Samples) and (at.samples - at.begun) >= max(1, len(self.source)):
            raise ConfigError(other_data(at, len(self.source)))
        self._stop()
        self._at, self._resumes, self._ended = at, True, False

    def __iter__(self) -> Iterator[Any]:
        """One epoch: the rest of this one at first and after `seek`, otherwise the next."""
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

    def _next(self) -> Any:
        """The next micro-batch of any epoch."""
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
        except BaseException:
            self._stop()
            self._resumes = True
            raise
        self._at, self._resumes = Position(**self._streams[0].get_state()), False
        return batch

    def _start(self, micro: int, train: int) -> None:
        from jzero.data.stream import (
            Plan,
            stream,  # imports grain, which takes a second
        )

        self._stop()
        sharding = self.step.batch_sharding
        plan = Plan(
            self.source, self.seed if self.shuffle else None, self.drop_last, micro, train,
            mine=rows_of_this_process(sharding, micro), put=lambda rows: place_batch(rows, sharding, micro),
        )  # fmt: skip
        self._streams, self._sizes = [stream(plan, self._at)], (micro, train)
        # With the loader, or when Python ends: a thread that is then inside of C++ would abort the process.
        self._end = weakref.finalize(self, _end, self._streams)

    def _stop(self) -> None:
        if self._streams:
            self._end()


def _end(streams: list[Any]) -> None:
    while streams:
        streams.pop().close()


class RepeatingLoader:
    """An iterator that starts its loader again whenever it ends.

    >>> loader = RepeatingLoader([1, 2])
    >>> [next(loader) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Any):
        self.loader, self.iterator = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)
