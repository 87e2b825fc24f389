"""Which samples of the training data a step ran on."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from jzero.data import DataLoader
from jzero.data.order import Position
from jzero.data.sources import IterableStyle
from jzero.data.stream import StreamSpec, indexed_batches


class _Numbers:
    """Training data whose samples are their own numbers."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: Any) -> np.ndarray:
        return np.asarray(indices)


def samples_between(loader: DataLoader | None, before: Any, after: Any, micro_batches: int) -> np.ndarray | None:
    """List the samples of the micro-batches that a loader returned between two positions, in order.

    Args:
      before, after: with the loader's `position`.

    Returns:
      Indices into the training data; None if it has no length, or the micro-batches came from elsewhere.
    """
    if loader is None or isinstance(loader.source, IterableStyle) or before.position == after.position:
        return None
    micro, train = loader.step.micro_size, loader.step.batch_sizes.train
    spec = StreamSpec(
        _Numbers(len(loader.source)), loader.seed if loader.shuffle else None, loader.drop_last, micro, train,  # type: ignore[arg-type]
        mine=np.arange(micro), put=lambda rows: rows,
    )  # fmt: skip
    batches = list(islice(indexed_batches(spec, Position.from_json(dict(before.position))), micro_batches))
    same = batches[-1][1] == Position.from_json(dict(after.position))
    return np.concatenate([rows for rows, _ in batches]) if same else None
