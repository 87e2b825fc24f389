"""Interleaves sources by weight: which source a sample number belongs to, and which of its samples that is.

Everything is a function of the seed and the number, computed without the numbers before it:

- A *segment* is a run of sample numbers with constant weights. A stage starts a segment; so does a source that is used
  up and left out. A handful of segments describe any number of samples.
- A segment is cut into blocks of BLOCK samples; the last may be incomplete. Each block holds the same number of samples
  of a source, its quota: the weights in parts of BLOCK, rounded by largest remainder.
- In a block, sample i of a source with quota q lies at the point (i + u) / q, where u in [0, 1) is random (stratified
  sampling). The samples of all sources in the order of their points are the block's pattern. So any number of
  consecutive samples has the weights, up to a sample or two of each source, without a rhythm that a batch size could
  share.

The random numbers of block b in the segment that starts at s are the raw output of NumPy's PCG64((seed, s, b)), one for
each sample of the first source, then of the second, and so on; u is its upper 53 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from jzero.data.order import ENDLESS
from jzero.errors import ConfigError

Exhaustion = Literal["repeat", "stop", "drop"]
BLOCK = 2**16  # samples


class Segment(NamedTuple):
    """Sample numbers with constant weights.

    Attributes:
      start: the first number.
      quotas: samples of each source in a block.
      before: samples of each source before `start`.
    """

    start: int
    quotas: np.ndarray
    before: np.ndarray


class Interleaving:
    """The order in which several sources are read.

    Args:
      lengths: samples of each source.
      stages: {first sample number: the weight of each source}, with a stage at 0.
      exhaustion: when all samples of a source were read, "repeat" reads it again, "drop" leaves it out, and "stop" ends
        the epoch.
      seed: of the patterns.

    Attributes:
      length: samples in an epoch.
      used_up: [(the number after its last sample, source)], not for "repeat".

    Raises:
      ConfigError: a weight that is too small, or a stage whose sources are used up before it ends.

    >>> interleaving = Interleaving([100, 100], {0: [0.75, 0.25]}, "repeat", seed=0)
    >>> sources, samples = interleaving.locate(np.arange(8))
    >>> sources.tolist(), samples.tolist()
    ([0, 0, 1, 0, 0, 0, 1, 0], [0, 1, 0, 2, 3, 4, 1, 5])
    >>> interleaving.taken(10**12).tolist()
    [750000000000, 250000000000]
    """

    def __init__(
        self, lengths: Sequence[int], stages: Mapping[int, Sequence[float]], exhaustion: Exhaustion, seed: int
    ):
        self.lengths, self.seed = np.array(lengths, np.int64), seed
        self.segments: list[Segment] = []
        self.used_up: list[tuple[int, int]] = []
        self._pattern = lru_cache(4)(self._make_pattern)
        self.length = self._plan(dict(sorted(stages.items())), exhaustion)
        self._starts = np.array([segment.start for segment in self.segments])
        if self.length < ENDLESS:
            self._whole = self._taken_in(len(self.segments) - 1, self.length)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find sample numbers [n]: (the source of each [n], how many samples of it come before [n])."""
        epochs, numbers = np.divmod(np.asarray(numbers, np.int64), self.length)
        at = np.searchsorted(self._starts, numbers, side="right") - 1
        blocks, slots = np.divmod(numbers - self._starts[at], BLOCK)
        sources, samples = np.empty_like(numbers), np.empty_like(numbers)
        for segment, block in set(zip(at.tolist(), blocks.tolist(), strict=True)):
            here = (at == segment) & (blocks == block)
            which, ordinal = (x[slots[here]] for x in self._pattern(segment, block))
            _, quotas, before = self.segments[segment]
            sources[here], samples[here] = which, before[which] + block * quotas[which] + ordinal
        if epochs.any():
            samples += epochs * self._whole[sources]
        return sources, samples

    def taken(self, number: int) -> np.ndarray:
        """Count the samples of each source among the first `number`."""
        epoch, rest = divmod(number, self.length)
        segment = int(np.searchsorted(self._starts, rest, side="right")) - 1
        return self._taken_in(segment, rest) + (epoch * self._whole if epoch else 0)

    def _plan(self, stages: dict[int, Sequence[float]], exhaustion: Exhaustion) -> int:
        """Make the segments and return the number of samples."""
        start, before = 0, np.zeros(len(self.lengths), np.int64)
        ends = [*list(stages)[1:], ENDLESS]
        for weights, stage_end in zip(stages.values(), ends, strict=True):
            while start < stage_end:
                live = np.array(weights, float) * (1 if exhaustion == "repeat" else before < self.lengths)
                if not live.any():
                    if stage_end == ENDLESS:
                        return start
                    raise ConfigError(
                        f"stages: all sources of a stage are used up at sample {start:,}, before the next stage begins "
                        f'at {stage_end:,}: begin it earlier, add data, or use exhaustion="repeat"'
                    )
                self.segments.append(Segment(start, quotas(live.tolist()), before))
                last = len(self.segments) - 1
                end = stage_end if exhaustion == "repeat" else min(stage_end, self._first_used_up(last))
                if end == ENDLESS:
                    return end
                used, before = before, self._taken_in(last, end)
                start = end
                finished = np.flatnonzero((used < self.lengths) & (before >= self.lengths)).tolist()
                if exhaustion != "repeat":
                    self.used_up += [(start, source) for source in finished]
                if exhaustion == "stop" and finished:
                    return start
        raise AssertionError("the last stage has no end")

    def _first_used_up(self, last: int) -> int:
        """Find the number after which a source of the segment has no sample left."""
        start, quota, before = self.segments[last]
        read = np.flatnonzero(quota)
        blocks, rest = np.divmod(self.lengths[read] - before[read] - 1, quota[read])
        block = int(blocks.min())
        which, ordinal = self._pattern(last, block)
        slots = [
            np.flatnonzero((which == source) & (ordinal == i))[0]
            for source, i, b in zip(read, rest, blocks, strict=True)
            if b == block
        ]
        return start + block * BLOCK + int(min(slots)) + 1

    def _taken_in(self, segment: int, number: int) -> np.ndarray:
        """Count the samples of each source among the first `number` of an epoch, which end in this segment."""
        start, quota, before = self.segments[segment]
        block, slot = divmod(number - start, BLOCK)
        counts = before + block * quota
        return counts + np.bincount(self._pattern(segment, block)[0][:slot], minlength=len(quota)) if slot else counts

    def _make_pattern(self, segment: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute a block's pattern: (source [BLOCK], number of its samples before in the block [BLOCK])."""
        start, quota, _ = self.segments[segment]
        source = np.repeat(np.arange(len(quota)), quota)
        ordinal = np.arange(BLOCK) - np.repeat(np.cumsum(quota) - quota, quota)
        random = (np.random.PCG64((self.seed, start, block)).random_raw(BLOCK) >> np.uint64(11)) * 2.0**-53
        order = np.argsort((ordinal + random) / quota[source], kind="stable")
        return source[order], ordinal[order]


def quotas(weights: Sequence[float]) -> np.ndarray:
    """Divide BLOCK samples among sources by weight, by largest remainder; of equal remainders the first.

    Raises:
      ConfigError: a weight that is positive and gets no sample.
    """
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) / total * BLOCK for weight in weights]  # equal on every machine
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: whole[k] - exact[k])
    for k in by_remainder[: BLOCK - sum(whole)]:
        whole[k] += 1
    for weight, samples in zip(weights, whole, strict=True):
        if weight and not samples:
            raise ConfigError(
                f"weight = {weight:g}: must be at least 1/{BLOCK:,} of the sum {float(total):g}; use a larger weight, "
                "or leave the source out"
            )
    return np.array(whole, np.int64)
