"""Pipeline schedules as pure tables: the operations of every stage at every tick.

The stages run in lockstep: in one tick each runs up to three operations, then sends its output to its neighbour. F is
the forward pass of one chunk of layers, B its backward pass. Where the backward pass is split, B is the gradient of the
chunk's input and W the gradient of its weights, at the same tick or later.

With S stages, V chunks per stage (chunk c of stage s is the c*S + s-th slice of the layers) and M micro-batches, a
multiple of S where V > 1:

| schedule      | ticks with these operations                           | bubble; F, B, W: costs for a whole stage |
|---------------|-------------------------------------------------------|------------------------------------------|
| `gpipe`       | F: M+S-1, B: M+S-1                                    | (S-1) / (M + S-1)                        |
| `1f1b`        | F: S-1, FB: M, B: S-1                                 | (S-1) / (M + S-1)                        |
| `interleaved` | F: SV-1, FB: MV+S-SV, B: SV-1                         | (S-1) / (MV + S-1)                       |
| `zero_bubble` | F: SV-1, FB: S-1, FBW: MV+1-SV, BW: SV-1 (for M >= S) | (S-1)(F+B) / (MV(F+B+W) + (S-1)(F+B))    |

`zero_bubble` delays a W only if it would lengthen a tick in which another stage has no B yet: on stage s the W of the
first s chunks. The delayed W fill the idle ticks at the end; every other W runs with its B.

Chunks in flight on stage s, from a chunk's F until the end of its B or W, in chunks of 1/(SV) of the layers: `gpipe` M,
`1f1b` 2S-1 - 2s, `interleaved` SV+S-1 - 2s, `zero_bubble` SV+S-1 - s; at most MV for all of them.

Sources: GPipe, Huang et al., arXiv:1811.06965; 1F1B and interleaving, Narayanan et al., arXiv:2104.04473; the split
backward pass, Qi et al., arXiv:2401.10241. These run in lockstep, so bubbles and memory may differ from the papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jzero.config.schedule_names import SCHEDULE_NAMES, ScheduleName, chunk_problems
from jzero.errors import ConfigError


class Work(NamedTuple):
    """One operation (F, B or W) on every stage at every tick: arrays [ticks, stages], -1 where a stage is idle."""

    chunk: np.ndarray
    micro: np.ndarray

    @property
    def active(self) -> np.ndarray:
        return self.micro >= 0


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """A pipeline schedule: one table per operation.

    `weight` is None if B is the whole backward pass; `backward` is idle in an evaluation.
    """

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
        """The operations that occur, by letter, in the order in which a tick runs them."""
        works = {"F": self.forward, "B": self.backward, "W": self.weight}
        return {letter: work for letter, work in works.items() if work is not None and work.active.any()}

    @cached_property
    def phases(self) -> list[tuple[str, int]]:
        """Runs of consecutive ticks with the same operations: [("F", 3), ("FB", 16), ("B", 3)]."""
        letters = ["".join(w for w, work in self.works.items() if work.active[t].any()) for t in range(self.ticks)]
        return [(letter, len(list(ticks))) for letter, ticks in groupby(letters)]

    def bubble(self, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> float:
        """Return the fraction of time that a stage is idle, given the costs of a stage's F, input-gradient B and W.

        A tick takes as long as all operations that any stage runs in it.
        """
        split = self.weight is not None
        costs = {"F": forward, "B": backward if split else backward + weight, "W": weight}
        total = sum(ticks * sum(costs[work] for work in works) for works, ticks in self.phases)
        return 1 - self.micro_batches * self.chunks * sum(costs[work] for work in self.works) / total

    @cached_property
    def in_flight(self) -> np.ndarray:
        """[stages]: the maximum number of chunks between their F and the end of their last operation."""
        *_, last = self.works.values()
        done, waiting = np.cumsum(last.active, axis=0), np.cumsum(self.forward.active, axis=0)
        return (waiting - np.vstack([np.zeros_like(done[:1]), done[:-1]])).max(axis=0)

    def __repr__(self) -> str:
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"PipelineSchedule({self.name}, {self.stages} stages, {self.micro_batches} micro-batches{chunks}: "
            f"{self.ticks} ticks, bubble {self.bubble():.1%}, at most {self.in_flight.max()} in flight)"
        )


def make_schedule(name: ScheduleName | str, stages: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """Make the table of a schedule.

    Args:
      name: "gpipe", "1f1b", "interleaved" or "zero_bubble".
      stages: S, the number of pipeline stages.
      micro_batches: M, any positive number; with chunks, a multiple of S leaves no gaps.
      chunks: V, slices of the layers per stage; must be 1 for "gpipe" and "1f1b".

    Raises:
      ConfigError: unknown name, a size below 1, or more chunks than the schedule supports.

    >>> make_schedule("1f1b", stages=4, micro_batches=16)
    PipelineSchedule(1f1b, 4 stages, 16 micro-batches: 22 ticks, bubble 15.8%, at most 7 in flight)
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
    first = (
        stages * chunks - 1
    )  # the tick of the last stage's first F of the last chunk: its B can run in the same tick
    start = first + np.arange(stages)[::-1]
    backward = _work(stages, micro_batches, chunks, start, mirrored=True)
    weight = None
    if name == "zero_bubble":
        weight = _work(stages, micro_batches, chunks, np.full(stages, start[0]), mirrored=True, turn=True)
    return _schedule(name, stages, micro_batches, chunks, forward, backward, weight)


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """Make the table of an evaluation: forward passes only."""
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
    """Make the table of one operation: stage s runs item i at tick start[s] + i.

    Item i = g*S*V + c*S + k is chunk c (V-1-c if `mirrored`) of micro-batch g*S + k. With one chunk these are the
    micro-batches in order; with more they run in groups of S, and an incomplete last group leaves gaps.

    With `turn`, stage s runs item (s + i) mod n instead: its first s items come last. `zero_bubble` delays W this way.
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
) -> PipelineSchedule:
    """Pad the operations to the same number of ticks and drop idle ticks at the end."""
    works = [work for work in (forward, backward, weight) if work is not None]
    ticks = max((int(np.flatnonzero(work.active.any(axis=1)).max(initial=-1)) + 1) for work in works)

    def fit(work: Work) -> Work:
        return Work(*(np.vstack([x, np.full((ticks, stages), -1)])[:ticks] for x in work))

    rest = None if weight is None else fit(weight)
    return PipelineSchedule(name, stages, micro_batches, chunks, fit(forward), fit(backward), rest)


def slots(first: Work, last: Work) -> tuple[np.ndarray, np.ndarray, int]:
    """Assign the buffer slots that hold the output of `first` until `last` has used it.

    Idle stages write too, because lockstep stages do not branch; an idle stage writes to a free slot.

    Returns:
      (the slot that each stage writes [ticks, stages], the slot that it reads [ticks, stages], the number of slots)
    """
    ticks, stages = first.micro.shape
    write, read = np.zeros((2, ticks, stages), np.int32)
    size = 1
    for stage in range(stages):
        waiting: dict[tuple[int, int], int] = {}
        free = list(range(ticks + 1))  # a heap, so that the lowest free slot is reused first and `size` stays minimal
        for t in range(ticks):
            write[t, stage] = free[0]
            size = max(size, free[0] + 1)
            if first.micro[t, stage] >= 0:
                waiting[first.chunk[t, stage], first.micro[t, stage]] = heappop(free)
            if last.micro[t, stage] >= 0:
                read[t, stage] = waiting.pop((last.chunk[t, stage], last.micro[t, stage]))
                heappush(free, int(read[t, stage]))
    return write, read, size
