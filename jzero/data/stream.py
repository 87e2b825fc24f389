"""The stream of micro-batches that a thread reads ahead: iterators of grain, whose state is the position.

Only whole micro-batches are grain's elements, whose prefetching thread adds 0.05 ms to each. Sample by sample through
its transformations (shuffle, batch) 64 images of 784 floats take 2.6 ms on one CPU core, one fancy index 0.01 ms;
8 rows of 4,096 tokens from a file 1.2 ms and 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import grain
import jax
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from jzero.data.order import Position, other_data, shuffled
from jzero.data.sources import Samples, Source, noted, stack, too_few
from jzero.errors import ConfigError

PREFETCH = 2  # micro-batches


@dataclass(frozen=True)
class Plan:
    """What is read, and how: nothing that changes.

    Attributes: `seed`: None for the data's own order. `micro`, `train`: samples of a micro-batch of all replicas, of a
    global batch. `mine`: which of a micro-batch's samples are this process's. `put`: from these to what is given.
    """

    source: Source | Samples
    seed: int | None
    drop_last: bool
    micro: int
    train: int
    mine: np.ndarray
    put: Callable[[Any], Any]


def stream(plan: Plan, start: Position, prefetch: int = PREFETCH) -> grain.DatasetIterator:
    """Micro-batches from `start` on, epoch after epoch; `get_state()` is the Position after the last one given.

    It ends with an iterator that ends. `close()` stops its thread.
    """
    return iter(ThreadPrefetchIterDataset(_MicroBatches(plan, start), prefetch_buffer_size=prefetch))


class _MicroBatches(grain.IterDataset):
    def __init__(self, plan: Plan, start: Position):
        super().__init__()
        self._plan, self._start = plan, start

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(self._plan, self._start)


class _Iterator(grain.DatasetIterator):
    def __init__(self, plan: Plan, start: Position):
        super().__init__()
        self._position = start
        make = walk if isinstance(plan.source, Samples) else draw
        self._batches = make(plan, start)

    def __next__(self) -> Any:
        batch, self._position = next(self._batches)
        return batch

    def get_state(self) -> dict[str, int]:
        return self._position._asdict()

    def set_state(self, state: dict[str, int]) -> None:
        raise NotImplementedError("a stream starts where it starts; make another")


def draw(r: Plan, at: Position) -> Iterator[tuple[Any, Position]]:
    """(micro-batch, position after it) of a source with a length: only this process's rows are read."""
    length, at = len(r.source), at.aligned(r.micro, r.train)  # type: ignore[arg-type]
    while True:
        end = at.end(length, r.train, r.drop_last)
        while at.samples < end:
            numbers = (at.samples + r.mine) % length
            chosen = numbers if r.seed is None else shuffled(numbers, length, r.seed, at.epoch)
            batch = r.source.rows(chosen)  # type: ignore[union-attr]
            wrong = [x for x in jax.tree.leaves(batch) if np.shape(x)[:1] != (len(chosen),)]
            if wrong:
                raise ConfigError(
                    f"training_data: {type(r.source).__name__}.rows gave a leaf of shape {np.shape(wrong[0])} for "
                    f"{len(chosen)} indices"
                )
            epoch, at = at.epoch, at.after(r.micro, r.train, end)
            yield r.put(batch), at
            if at.epoch > epoch:
                break
        else:
            if at == Position(at.epoch):
                raise ConfigError(too_few(length, r.train))
            at = Position(at.epoch + 1)


def walk(r: Plan, at: Position) -> Iterator[tuple[Any, Position]]:
    """The same of samples without a length: every one is read, this process's are kept."""
    source: Samples = r.source  # type: ignore[assignment]
    for epoch in count(at.epoch):
        if epoch > at.epoch and source.once:
            return
        start = at if epoch == at.epoch else Position(epoch)
        yield from _walk_epoch(r, start, source.start(epoch))


def _walk_epoch(r: Plan, at: Position, samples: Iterator[Any]) -> Iterator[tuple[Any, Position]]:
    head: list[Any] = []  # the first global batch, which fills up the last
    kept = set(r.mine.tolist())

    def read() -> Iterator[Any]:
        for number in count():
            if (sample := noted(number, lambda: next(samples, _END))) is _END:
                return
            if number < r.train:
                head.append(sample)
            yield sample

    def global_batch() -> list[Any]:
        """The next one, without what is other processes'; a short one, which is the last, or none."""
        batch = [x if i % r.micro in kept else None for i, x in enumerate(islice(rest, r.train))]
        return [] if r.drop_last and len(batch) < r.train else batch

    begun, at = at.begun, at.aligned(r.micro, r.train)
    rest, first = read(), at.samples - at.begun
    there = sum(1 for _ in islice(rest, first))
    if there < first and there <= at.samples - begun:
        raise ConfigError(other_data(at, there))
    batch = global_batch()
    if not batch and not first:
        raise ConfigError(too_few(len(head), r.train))
    while batch:
        end, following = first + len(batch), global_batch()
        batch += [head[n % end] for n in range(end, first + r.train)]
        for begun in range(at.begun, r.train, r.micro):
            rows, last = [batch[begun + i] for i in r.mine], not following and begun + r.micro == r.train
            at = at.after(r.micro, r.train, first + r.train if last else first + 2 * r.train)
            yield r.put(stack(rows)), at
        batch, first = following, first + r.train


_END = object()
