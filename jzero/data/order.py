"""The order of an epoch's samples and the position in it: pure functions of numbers, independent of the layout.

An epoch is a whole number of global batches. Without drop_last the last batch is filled with the epoch's first samples,
as PyTorch's DistributedSampler does; with drop_last the remaining samples are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jzero.errors import ConfigError


class Position(NamedTuple):
    """The progress of a loader: epochs, samples of this epoch, and those of them in an unfinished global batch."""

    epoch: int = 0
    samples: int = 0
    begun: int = 0

    @staticmethod
    def from_json(position: Any) -> Position:
        """Read a position that `to_json` returned.

        Raises:
          ConfigError: not a position.
        """
        wanted = '{"epoch": ..., "samples": ...}, whole numbers from 0, as loader.position returned them'
        known = isinstance(position, dict) and {"epoch", "samples"} <= position.keys() <= set(Position._fields)
        if not known or not all(type(n) is int and n >= 0 for n in position.values()):
            raise ConfigError(f"position = {position!r}: must be {wanted}")
        made = Position(**position)
        if made.begun > made.samples:
            raise ConfigError(f"position = {position!r}: begun must be at most samples")
        return made

    def to_json(self) -> dict[str, int]:
        """Return {"epoch", "samples"}, and "begun" inside a global batch."""
        return {name: n for name, n in self._asdict().items() if n or name != "begun"}

    def aligned(self, micro: int, train: int) -> Position:
        """Convert this position to other batch sizes.

        `begun` survives only if a micro-batch of the new size ends there; else a new global batch starts here.
        """
        begun = self.begun % train
        return self._replace(begun=0 if begun % micro else begun)

    def end(self, length: int, train: int, drop_last: bool) -> int:
        """Compute the value of `samples` at which this epoch ends, for `length` samples in global batches of `train`.

        Counted from the start of the current global batch, so that a batch size that changed in mid-epoch still gives
        whole batches.

        >>> Position(0, 4).end(10, 4, drop_last=False), Position(0, 4).end(10, 4, drop_last=True)
        (12, 8)
        """
        start = self.samples - self.begun
        rest = max(0, length - start)
        return start + (rest // train if drop_last else -(-rest // train)) * train

    def after(self, micro: int, train: int, end: int) -> Position:
        """Return the position one micro-batch later, in an epoch that ends at `end`."""
        samples = self.samples + micro
        return (
            Position(self.epoch + 1) if samples >= end else Position(self.epoch, samples, (self.begun + micro) % train)
        )


def other_data(at: Position, samples: int) -> str:
    """Word the error message for a position beyond data of `samples` samples."""
    return (
        f"position = {at.to_json()}: training_data has {samples} samples per epoch, so the position belongs to other "
        "data; use that data, or load only the parameters (engine.load_checkpoint(..., load_module_only=True))"
    )


CACHED_SAMPLES = 2**20  # samples
ENDLESS = 2**62  # the length of data that never end


def permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """Compute the epoch's random order."""
    # Raw PCG64 output is the same in every NumPy version, a Generator's is not; a resumed run needs the same order.
    return np.argsort(np.random.PCG64((seed, epoch)).random_raw(length), kind="stable")


_cached = lru_cache(maxsize=2)(permutation)


def shuffled(
    numbers: np.ndarray, length: int, seed: int, epoch: int,
    small: int = CACHED_SAMPLES, permutation: Callable[[int, int, int], np.ndarray] = _cached,
) -> np.ndarray:  # fmt: skip
    """Return the samples at positions `numbers` of the epoch's random order.

    Up to `small` samples, one permutation per epoch (8 bytes a sample) is computed by `permutation`, which caches it.
    Above, grain's index_shuffle computes each sample in constant memory, in 2 to 9 us for 10^6 to 5 x 10^9 samples. It
    is slow for small data (25 us for 1,000 samples, 6,500 us for 6), because its smallest block has 16 bits.
    """
    if length <= small:
        return permutation(length, seed, epoch)[numbers]
    from grain.experimental import index_shuffle

    key = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    return np.fromiter((index_shuffle(n, length - 1, key, 4) for n in numbers.tolist()), np.int64, len(numbers))
