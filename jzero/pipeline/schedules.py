"""Pipeline schedules as pure tables: which stage runs what at which tick.

Every stage does its work of one tick in lockstep with the others, then sends its output on. A tick has up to three
works: F, the forward pass of one chunk of layers; B, its backward pass; and where the backward pass is split, B is the
gradient of the chunk's input and W that of its weights, at the same tick or later.

With S stages, V chunks per stage (chunk c of stage s is the c*S + s-th slice of the layers) and M micro-batches, a
multiple of S where V > 1:

| schedule      | ticks with these works                                | bubble, of costs F, B, W of a stage      |
|---------------|-------------------------------------------------------|------------------------------------------|
| `gpipe`       | F: M+S-1, B: M+S-1                                    | (S-1) / (M + S-1)                        |
| `1f1b`        | F: S-1, FB: M, B: S-1                                 | (S-1) / (M + S-1)                        |
| `interleaved` | F: SV-1, FB: MV+S-SV, B: SV-1                         | (S-1) / (MV + S-1)                       |
| `zero_bubble` | F: SV-1, FB: S-1, FBW: MV+1-SV, BW: SV-1 (for M >= S) | (S-1)(F+B) / (MV(F+B+W) + (S-1)(F+B))    |

`zero_bubble` puts off only the W that would make a tick longer in which some stage has no B yet: of the first s chunks
on stage s. They wait for the end, where there are ticks to fill; all others run with their B, as in `interleaved`.

In flight on stage s, from a chunk's F until the end of its B or W, in chunks of 1/(SV) of the layers: `gpipe` M, `1f1b`
2S-1 - 2s, `interleaved` SV+S-1 - 2s, `zero_bubble` SV+S-1 - s, and never more than all the MV.

(gpipe: Huang et al., arXiv:1811.06965; 1F1B: Narayanan et al., arXiv:2104.04473, as is interleaving; the split
backward pass: Qi et al., arXiv:2401.10241. Here in lockstep, so bubbles and memory may differ from theirs.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby
from os import PathLike
from typing import NamedTuple

import numpy as np

from jzero.config.schedule_names import SCHEDULE_NAMES, ScheduleName, chunk_problems
from jzero.errors import ConfigError


class Work(NamedTuple):
    """One work on every stage and tick: arrays [ticks, stages]; chunk and micro-batch are -1 where a stage is idle."""

    chunk: np.ndarray
    micro: np.ndarray

    @property
    def active(self) -> np.ndarray:
        return self.micro >= 0


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table. `weight` is None where B is the whole backward pass; `backward` is idle in an evaluation."""

    name: str
    stages: int
    micro_batches: int
    chunks: int
    forward: Work
    backward: Work
    weight: Work | None

    @property
    def ticks(self) -> int:
        return len(self.forward.micro)

    @cached_property
    def works(self) -> dict[str, Work]:
        """The works that the table has by their letters, in the order in which a tick does them."""
        works = {"F": self.forward, "B": self.backward, "W": self.weight}
        return {letter: work for letter, work in works.items() if work is not None and work.active.any()}

    @cached_property
    def phases(self) -> list[tuple[str, int]]:
        """Consecutive ticks with the same works on any stage: [("F", 3), ("FB", 16), ("B", 3)]."""
        letters = ["".join(w for w, work in self.works.items() if work.active[t].any()) for t in range(self.ticks)]
        return [(letter, len(list(ticks))) for letter, ticks in groupby(letters)]

    def bubble(self, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> float:
        """The fraction of the time that a stage is idle, if F, the input's B and W of a whole stage cost so much.

        A tick takes as long as the works that any stage does in it.
        """
        split = self.weight is not None
        costs = {"F": forward, "B": backward if split else backward + weight, "W": weight}
        total = sum(ticks * sum(costs[work] for work in works) for works, ticks in self.phases)
        return 1 - self.micro_batches * self.chunks * sum(costs[work] for work in self.works) / total

    @cached_property
    def in_flight(self) -> np.ndarray:
        """[stages]: the most chunks at a time from their F to the end of their last work."""
        *_, last = self.works.values()
        done, waiting = np.cumsum(last.active, axis=0), np.cumsum(self.forward.active, axis=0)
        return (waiting - np.vstack([np.zeros_like(done[:1]), done[:-1]])).max(axis=0)

    def draw(self, path: str | PathLike[str] | None = None) -> str:
        """The table as text; with a path (.svg, or .png if matplotlib is installed) a picture, and the path.

        A row per stage, and a tick is as wide as the works that any stage does in it: the width is lockstep time.

        Raises:
          ConfigError: another suffix, or no matplotlib.

        >>> print(make_schedule("1f1b", stages=2, micro_batches=3).draw())
        Schedule(1f1b, 2 stages, 3 micro-batches: 5 ticks, bubble 25.0%, at most 3 in flight)
        stage 0 | F0 | F1 ·  | F2 B0 | ·  B1 | B2 |
        stage 1 | ·  | F0 B0 | F1 B1 | F2 B2 | ·  |
        tick    | 0  | 1     | 2     | 3     | 4  |
        F forward, B backward, · idle; the number: the micro-batch
        """
        from jzero.pipeline import draw

        return draw.draw(self, path)

    def __repr__(self) -> str:
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"Schedule({self.name}, {self.stages} stages, {self.micro_batches} micro-batches{chunks}: {self.ticks} "
            f"ticks, bubble {self.bubble():.1%}, at most {self.in_flight.max()} in flight)"
        )


def make_schedule(name: ScheduleName | str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The table of a schedule.

    Args:
      name: "gpipe", "1f1b", "interleaved" or "zero_bubble".
      stages: S; micro_batches: M, any number (with chunks a multiple of S wastes nothing).
      chunks: V, slices of the layers on one stage; 1 but for "interleaved" and "zero_bubble".

    Raises:
      ConfigError: an unknown name, sizes below 1, chunks that the schedule does not have.

    >>> make_schedule("1f1b", stages=4, micro_batches=16)
    Schedule(1f1b, 4 stages, 16 micro-batches: 22 ticks, bubble 15.8%, at most 7 in flight)
    """
    problems = _bad_sizes(stages, micro_batches, chunks)
    if name not in SCHEDULE_NAMES:
        problems.append(f"pipeline.schedule = {name!r}: choose one of {', '.join(SCHEDULE_NAMES)}")
    if problems := problems or list(chunk_problems(name, chunks)):
        raise ConfigError(*problems)
    if name == "gpipe":
        forward = _work(stages, micro_batches, 1, start=np.arange(stages))
        start = len(forward.micro) + np.arange(stages)[::-1]
        return _schedule(name, stages, micro_batches, 1, forward, _work(stages, micro_batches, 1, start, mirrored=True))
    forward = _work(stages, micro_batches, chunks, start=np.arange(stages))
    first = stages * chunks - 1  # the last stage's first forward pass of the last chunk
    start = first + np.arange(stages)[::-1]
    backward = _work(stages, micro_batches, chunks, start, mirrored=True)
    weight = None
    if name == "zero_bubble":
        weight = _work(stages, micro_batches, chunks, np.full(stages, start[0]), mirrored=True, turn=True)
    return _schedule(name, stages, micro_batches, chunks, forward, backward, weight)


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The table of an evaluation: forward passes, one after the other."""
    if problems := _bad_sizes(stages, micro_batches, chunks):
        raise ConfigError(*problems)
    idle = np.full((0, stages), -1)
    forward = _work(stages, micro_batches, chunks, start=np.arange(stages))
    return _schedule("forward_only", stages, micro_batches, chunks, forward, Work(idle, idle))


def _bad_sizes(stages: int, micro_batches: int, chunks: int) -> list[str]:
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    return [
        f"{key} = {value!r}: must be a positive integer"
        for key, value in sizes.items()
        if not isinstance(value, int | np.integer) or value < 1
    ]


def _work(
    stages: int, micro_batches: int, chunks: int, start: np.ndarray, mirrored: bool = False, turn: bool = False
) -> Work:
    """One work: stage s does number i at tick start[s] + i, or number (s + i) mod their number if they `turn`.

    Number i = g*S*V + c*S + k is chunk c (the mirrored: V-1-c) of micro-batch g*S + k. Without chunks that is the
    micro-batches in order; with chunks they go through in groups of S, and a last group that is not full leaves gaps.
    """
    group = stages * chunks if chunks > 1 else 1
    width = stages if chunks > 1 else 1
    number = np.arange(-(-micro_batches // width) * group)
    chunk, micro = number % group // width, number // group * width + number % width
    chunk = chunks - 1 - chunk if mirrored else chunk
    table = np.full((2, int(start.max()) + len(number), stages), -1)
    for stage, first in enumerate(start):
        items = np.where(micro < micro_batches, (chunk, micro), -1)
        table[:, first : first + len(number), stage] = np.roll(items, -stage, axis=1) if turn else items
    return Work(*table)


def _schedule(
    name: str, stages: int, micro_batches: int, chunks: int, forward: Work, backward: Work, weight: Work | None = None
) -> Schedule:
    """The works padded to the same number of ticks, without idle ticks at the end."""
    works = [work for work in (forward, backward, weight) if work is not None]
    ticks = max((int(np.flatnonzero(work.active.any(axis=1)).max(initial=-1)) + 1) for work in works)

    def fit(work: Work) -> Work:
        return Work(*(np.vstack([x, np.full((ticks, stages), -1)])[:ticks] for x in work))

    rest = None if weight is None else fit(weight)
    return Schedule(name, stages, micro_batches, chunks, fit(forward), fit(backward), rest)


def slots(first: Work, last: Work) -> tuple[np.ndarray, np.ndarray, int]:
    """Where a buffer keeps what `first` makes until `last` has used it.

    A stage that is idle writes too, in lockstep: into a slot in which nothing waits.

    Returns:
      The slot that each stage writes [ticks, stages], the slot that it reads [ticks, stages], the number of slots.
    """
    ticks, stages = first.micro.shape
    write, read = np.zeros((2, ticks, stages), np.int32)
    size = 1
    for stage in range(stages):
        waiting: dict[tuple[int, int], int] = {}
        free = list(range(ticks + 1))  # a heap: the lowest first
        for t in range(ticks):
            write[t, stage] = free[0]
            size = max(size, free[0] + 1)
            if first.micro[t, stage] >= 0:
                waiting[first.chunk[t, stage], first.micro[t, stage]] = heappop(free)
            if last.micro[t, stage] >= 0:
                read[t, stage] = waiting.pop((last.chunk[t, stage], last.micro[t, stage]))
                heappush(free, int(read[t, stage]))
    return write, read, size
