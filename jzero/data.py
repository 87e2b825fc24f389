"""Feeding a run from arrays in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jzero.errors import ConfigError


class ArrayLoader:
    """Micro-batches of all replicas, drawn from arrays in memory in a new order every epoch.

    Iterating it is one epoch. `data` is a pytree of arrays with one leading sample dimension, or a sequence of
    samples (each a pytree of arrays), which are stacked. Without `drop_last` the last micro-batch is filled up with
    samples from the start of the epoch's order, as PyTorch's DistributedSampler does.

    >>> loader = ArrayLoader(np.arange(10), size=4, seed=0)
    >>> len(loader), sorted(set(np.concatenate(list(loader)).tolist())) == list(range(10))
    (3, True)
    """

    def __init__(self, data: Any, *, size: int, seed: int, drop_last: bool = False):
        samples = hasattr(data, "__getitem__") and not isinstance(data, dict | tuple | np.ndarray | jax.Array)
        if samples and len(data):
            data = jax.tree.map(lambda *xs: np.stack(xs), *[data[i] for i in range(len(data))])
        self.data = jax.tree.map(np.asarray, data)
        lengths = {len(x) for x in jax.tree.leaves(self.data)}
        if not any(lengths):
            raise ConfigError("training_data: there are no samples in it")
        if len(lengths) != 1:
            raise ConfigError(f"training_data: its arrays have {sorted(lengths)} samples; they must all have as many")
        self.samples, self.size, self.seed, self.drop_last = lengths.pop(), size, seed, drop_last
        if len(self) == 0:
            raise ConfigError(
                f"training_data: {self.samples} samples do not fill one micro-batch of {size} (micro-batch x replicas) "
                "and dataloader_drop_last is true; add data or make the micro-batch smaller"
            )
        self.epoch = 0

    def __len__(self) -> int:
        return self.samples // self.size if self.drop_last else -(-self.samples // self.size)

    def __repr__(self) -> str:
        return f"ArrayLoader({self.samples} samples, {len(self)} micro-batches of {self.size} an epoch)"

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)
        self.epoch += 1
        order = np.resize(order, len(self) * self.size)
        for rows in order.reshape(-1, self.size):
            yield jax.tree.map(lambda x, rows=rows: x[rows], self.data)


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
