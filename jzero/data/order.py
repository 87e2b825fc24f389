"""In what order an epoch's samples come, and where a run is in it: functions of numbers, of no layout.

An epoch is a whole number of global batches. Without drop_last the last one is filled up from the start of the epoch's
order, as PyTorch's DistributedSampler does; with it the rest of the samples is left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jzero.errors import ConfigError


class Position(NamedTuple):
    """What has been given: whole epochs, samples of this one, and those of them whose global batch is not complete."""

    epoch: int = 0
    samples: int = 0
    begun: int = 0

    @staticmethod
    def load(position: Any) -> Position:
        """From what `dump` made.

        Raises:
          ConfigError: what is no position.
        """
        wanted = '{"epoch": ..., "samples": ...}, whole numbers from 0, as loader.position gave them'
        if not isinstance(position, dict) or not {"epoch", "samples"} <= position.keys() <= set(Position._fields):
            raise ConfigError(f"position = {position!r}: must be {wanted}")
        if not all(type(n) is int and n >= 0 for n in position.values()):
            raise ConfigError(f"position = {position!r}: must be {wanted}")
        made = Position(**position)
        if made.begun > made.samples:
            raise ConfigError(f"position = {position!r}: begun must be at most samples")
        return made

    def dump(self) -> dict[str, int]:
        """As JSON holds it; between two steps {"epoch", "samples"}."""
        return {name: n for name, n in self._asdict().items() if n or name != "begun"}

    def aligned(self, micro: int, train: int) -> Position:
        """The same place for batches of these sizes: inside a global batch only where they have micro-batches end."""
        begun = self.begun % train
        return self._replace(begun=0 if begun % micro else begun)

    def end(self, length: int, train: int, drop_last: bool) -> int:
        """Where this epoch ends, of `length` samples in global batches of `train`, counted from this one's start.

        >>> Position(0, 4).end(10, 4, drop_last=False), Position(0, 4).end(10, 4, drop_last=True)
        (12, 8)
        """
        start = self.samples - self.begun
        rest = max(0, length - start)
        return start + (rest // train if drop_last else -(-rest // train)) * train

    def after(self, micro: int, train: int, end: int) -> Position:
        """One micro-batch further in an epoch with this end."""
        samples = self.samples + micro
        return (
            Position(self.epoch + 1) if samples >= end else Position(self.epoch, samples, (self.begun + micro) % train)
        )


def other_data(at: Position, samples: int) -> str:
    """What to say of a position that data with so many samples do not have."""
    return (
        f"position = {at.dump()}: training_data has {samples} samples an epoch; the position is of other data: give "
        "those, or take the parameters alone (engine.load_checkpoint(..., load_module_only=True)) and begin with these"
    )


SMALL = 2**20  # samples


def shuffled(numbers: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """Which samples are these numbers of the epoch's random order.

    Of up to `SMALL` samples a permutation is made once an epoch (8 MB). Of more, grain's index_shuffle says each in
    constant memory: 2 to 9 us a sample for 10^6 to 5 x 10^9 of them; but 25 us for 1,000 and 6,500 us for 6, as its
    smallest block has 16 bits.
    """
    if length <= SMALL:
        return _permutation(length, seed, epoch)[numbers]
    from grain.experimental import index_shuffle

    key = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    return np.fromiter((index_shuffle(n, length - 1, key, 4) for n in numbers.tolist()), np.int64, len(numbers))


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """Of raw random numbers, which unlike those of a Generator stay the same in every version of NumPy."""
    return np.argsort(np.random.PCG64((seed, epoch)).random_raw(length), kind="stable")
