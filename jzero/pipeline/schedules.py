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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jzero.config.checks import chunk_problems
from jzero.config.sections import SCHEDULE_NAMES, ScheduleName
from jzero.errors import ConfigError


class StageWork(NamedTuple):
    """One operation (F, B or W) on every stage at every tick: arrays [ticks, stages], -1 where a stage is idle."""

    chunk: np.ndarray
    micro: np.ndarray

    @property
    def active(self) -> np.ndarray:
        return self.micro >= 0

    def of_stage(self, stage: int) -> dict[int, tuple[int, int]]:
        """Map the ticks in which a stage is active to (chunk, micro-batch)."""
        return {int(t): (self.chunk[t, stage], self.micro[t, stage]) for t in np.flatnonzero(self.active[:, stage])}


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """A pipeline schedule: one table per operation.

    `weight` is None if B is the whole backward pass; `backward` is idle in an evaluation.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    forward: StageWork
    backward: StageWork
    weight: StageWork | None = None

    @property
    def ticks(self) -> int:
        return len(self.forward.micro)

    @cached_property
    def works(self) -> dict[str, StageWork]:
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
    stage = np.arange(stages)
    forward = _work(stages, micro_batches, chunks, start=stage)
    # The tick of the last stage's first B: "gpipe" waits for all F; else it is that of its first F of the last chunk.
    first = len(forward.micro) if name == "gpipe" else stages * chunks - 1
    backward = _work(stages, micro_batches, chunks, start=first + stage[::-1], mirrored=True)
    weight = None
    if name == "zero_bubble":
        start = np.full(stages, first + stages - 1)
        weight = _work(stages, micro_batches, chunks, start, mirrored=True, turn=True)
    return _schedule(name, stages, micro_batches, chunks, forward, backward, weight)


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> PipelineSchedule:
    """Make the table of an evaluation: forward passes only."""
    if problems := _bad_sizes(stages, micro_batches, chunks):
        raise ConfigError(*problems)
    idle = np.full((0, stages), -1)
    forward = _work(stages, micro_batches, chunks, start=np.arange(stages))
    return _schedule("forward_only", stages, micro_batches, chunks, forward, StageWork(idle, idle))


def _bad_sizes(stages: int, micro_batches: int, chunks: int) -> list[str]:
    sizes = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    return [
        f"{key} = {value!r}: must be a positive integer"
        for key, value in sizes.items()
        if not isinstance(value, int | np.integer) or value < 1
    ]


def _work(
    stages: int, micro_batches: int, chunks: int, start: np.ndarray, mirrored: bool = False, turn: bool = False
) -> StageWork:
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
    return StageWork(*table)


def _schedule(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    forward: StageWork,
    backward: StageWork,
    weight: StageWork | None = None,
) -> PipelineSchedule:
    """Pad the operations to the same number of ticks and drop idle ticks at the end."""
    works = [work for work in (forward, backward, weight) if work is not None]
    ticks = max((int(np.flatnonzero(work.active.any(axis=1)).max(initial=-1)) + 1) for work in works)
    idle = np.full((ticks, stages), -1)
    works = [StageWork(*(np.vstack([x, idle])[:ticks] for x in work)) for work in works]
    return PipelineSchedule(name, stages, micro_batches, chunks, *works)


def slots(first: StageWork, last: StageWork) -> tuple[np.ndarray, np.ndarray, int]:
    """Assign the buffer slots that hold the output of `first` until `last` has used it.

    Idle stages write too, because lockstep stages do not branch; an idle stage writes to a free slot.

    Returns:
      (the slot that each stage writes [ticks, stages], the slot that it reads [ticks, stages], the number of slots)
    """
    ticks, stages = first.micro.shape
    write, read = np.zeros((2, ticks, stages), np.int32)
    size = 1
    for stage in range(stages):
        made, used = first.of_stage(stage), last.of_stage(stage)
        waiting: dict[tuple[int, int], int] = {}
        free = list(range(ticks + 1))  # a heap, so that the lowest free slot is reused first and `size` stays minimal
        for t in range(ticks):
            write[t, stage] = free[0]
            size = max(size, free[0] + 1)
            if t in made:
                waiting[made[t]] = heappop(free)
            if t in used:
                read[t, stage] = waiting.pop(used[t])
                heappush(free, int(read[t, stage]))
    return write, read, size


Runs = Sequence["tuple[str, int] | tuple[Runs, int]"]


@dataclass(frozen=True)
class Program:
    """The ticks of a schedule, compressed, with their numbers.

    Attributes:
      runs: a nested sequence of (operations of a tick, number of such ticks) and (runs, repetitions).
      columns: the stages' numbers [ticks, stages], by name; the numbers of an idle stage are valid, but unused.
      stash, rest: slots of the buffers between F and the last of B and W, and between D and W.
      turns: whether the last stage runs B of a micro-batch in the tick of its F.
    """

    schedule: PipelineSchedule
    runs: Runs
    columns: dict[str, np.ndarray]
    stash: int
    rest: int
    turns: bool


def make_program(schedule: PipelineSchedule) -> Program:
    """Make the program of a schedule: add a tick at either end, for E before the first and G after the last."""
    end = np.full((1, schedule.stages), -1)

    def pad(work: StageWork) -> StageWork:
        return StageWork(*(np.vstack([end, x, end]) for x in work))

    forward, backward = pad(schedule.forward), pad(schedule.backward)
    last = pad(schedule.weight) if schedule.weight else backward
    whole = (np.array(last) == np.array(backward)).all(axis=(0, 2))  # [ticks]: every stage's W is that of its B
    put_off = [StageWork(*np.where(whole[:, None], -1, work)) for work in (backward, last)]

    columns: dict[str, np.ndarray] = {}
    works = {"F": forward, "B": backward, "W": last}
    for name, work in works.items():
        columns |= {f"{name}.chunk": np.maximum(work.chunk, 0), f"{name}.micro": np.maximum(work.micro, 0)}
        columns[f"{name}.active"] = work.active
    columns["F.slot"], columns["W.slot"], stash = slots(forward, last)
    columns["B.slot"] = _reads(forward, backward, columns["F.slot"])
    columns["B.rest"], columns["W.rest"], rest = slots(*put_off)

    ends = {  # no work is lost by the rolls: the first and the last tick are padding
        "E": np.roll(_at(forward, 0, 0), -1),
        "S": _at(backward if backward.active.any() else forward, -1, schedule.chunks - 1),
        "G": np.roll(_at(backward, 0, 0), 1),
    }
    columns |= {
        f"{name}.micro": np.maximum(micro, 0)[:, None].repeat(schedule.stages, 1) for name, micro in ends.items()
    }

    operations = {name: np.asarray(micro >= 0) for name, micro in ends.items()}
    some = {name: np.asarray(work.active.any(axis=1)) for name, work in works.items()}
    operations |= {"F": some["F"], "D": some["B"] & ~whole}
    for name, there in (("B", whole), ("W", ~whole)):
        every = works[name].active.all(axis=1)
        operations |= {name: every & there, name.lower(): some[name] & ~every & there}
    ticks = ["".join(op for op in "EFSDBbWwG" if operations[op][t]) for t in range(len(whole))]
    for t in range(1, len(ticks)):
        # One more tick with a select that it does not need is better than one more loop.
        if ticks[t].replace("B", "b").replace("W", "w") == ticks[t - 1]:
            ticks[t] = ticks[t - 1]
    runs = compress([(ops, len(list(same))) for ops, same in groupby(ticks)])
    turns = bool((_at(forward, -1, schedule.chunks - 1) == ends["S"]).all())
    return Program(schedule, runs, columns, stash, rest if operations["D"].any() else 0, turns)


def _at(work: StageWork, stage: int, chunk: int) -> np.ndarray:
    """Return, for each tick, the micro-batch for which this stage runs this chunk, or -1."""
    return np.where(work.chunk[:, stage] == chunk, work.micro[:, stage], -1)


def _reads(first: StageWork, later: StageWork, written: np.ndarray) -> np.ndarray:
    """Find the slots [ticks, stages] that `first` wrote and `later` reads."""
    read = np.zeros_like(written)
    for stage in range(written.shape[1]):
        slot = {work: written[t, stage] for t, work in first.of_stage(stage).items()}
        for t, work in later.of_stage(stage).items():
            read[t, stage] = slot[work]
    return read


def compress(runs: Runs) -> Runs:
    """Write repetitions once: a, b, a, b, a, b -> (a, b) three times. Fewer loops compile faster."""
    out: list[tuple] = []
    i = 0
    while i < len(runs):
        # Greedy: take the repetition that covers the most runs from here on, the shortest period first.
        period, times = 1, 1
        for p in range(1, (len(runs) - i) // 2 + 1):
            n = 1
            while runs[i + n * p : i + (n + 1) * p] == runs[i : i + p]:
                n += 1
            if n > 1 and n * p > period * times:
                period, times = p, n
        out += [(list(runs[i : i + period]), times)] if times > 1 else [runs[i]]
        i += period * times
    return out


def count(runs: Runs) -> int:
    """Count the ticks of a sequence of runs."""
    return sum(times * (1 if isinstance(what, str) else count(what)) for what, times in runs)


def passes(runs: Runs) -> float:
    """Count how often a program contains the layers of a stage; one forward and one backward pass are once."""
    each = (sum(x in "FBDW" for x in what.upper()) / 2 if isinstance(what, str) else passes(what) for what, _ in runs)
    return sum(each)
