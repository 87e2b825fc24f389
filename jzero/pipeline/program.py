"""A schedule as the executor runs it: the operations of each tick, and every stage's numbers for them.

The schedule has F, B and W. To these the program adds the ends, which all stages compute together for one micro-batch:

- E: the prefix, for the micro-batch that the first stage starts with at the next tick;
- S: the suffix and its gradient, when the last stage begins a micro-batch's backward pass (in a table without backward
  passes: ends its forward pass);
- G: the prefix's gradient, for the micro-batch that the first stage's backward pass ended at the tick before.

Where the table splits the backward pass, B is the whole of it, at a tick where every stage runs the W of its own B;
D is the gradient of the input alone. b and w are B and W at a tick where some stage is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from jzero.pipeline.schedules import PipelineSchedule, Work, slots

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

    def pad(work: Work) -> Work:
        return Work(*(np.vstack([end, x, end]) for x in work))

    forward, backward = pad(schedule.forward), pad(schedule.backward)
    last = pad(schedule.weight) if schedule.weight else backward
    whole = (np.array(last) == np.array(backward)).all(axis=(0, 2))  # [ticks]: every stage's W is that of its B
    put_off = [Work(*np.where(whole[:, None], -1, work)) for work in (backward, last)]

    columns: dict[str, np.ndarray] = {}
    for name, work in (("F", forward), ("B", backward), ("W", last)):
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

    operations: dict[str, Any] = {name: micro >= 0 for name, micro in ends.items()}
    operations |= {"F": forward.active.any(axis=1), "D": backward.active.any(axis=1) & ~whole}
    for name, work, there in (("B", backward, whole), ("W", last, ~whole)):
        every = work.active.all(axis=1)
        operations |= {name: every & there, name.lower(): work.active.any(axis=1) & ~every & there}
    ticks = ["".join(op for op in "EFSDBbWwG" if operations[op][t]) for t in range(len(whole))]
    for t in range(1, len(ticks)):
        # One more tick with a select that it does not need is better than one more loop.
        if ticks[t].replace("B", "b").replace("W", "w") == ticks[t - 1]:
            ticks[t] = ticks[t - 1]
    runs = compress([(ops, len(list(same))) for ops, same in groupby(ticks)])
    turns = bool((_at(forward, -1, schedule.chunks - 1) == ends["S"]).all())
    return Program(schedule, runs, columns, stash, rest if operations["D"].any() else 0, turns)


def _at(work: Work, stage: int, chunk: int) -> np.ndarray:
    """Return, for each tick, the micro-batch for which this stage runs this chunk, or -1."""
    return np.where(work.chunk[:, stage] == chunk, work.micro[:, stage], -1)


def _reads(first: Work, later: Work, written: np.ndarray) -> np.ndarray:
    """Find the slots [ticks, stages] that `first` wrote and `later` reads."""
    read = np.zeros_like(written)
    for stage in range(written.shape[1]):
        places = zip(first.chunk[:, stage], first.micro[:, stage], written[:, stage], strict=True)
        where = {(chunk, micro): slot for chunk, micro, slot in places}
        for t in np.flatnonzero(later.active[:, stage]):
            read[t, stage] = where[later.chunk[t, stage], later.micro[t, stage]]
    return read


def compress(runs: Runs) -> Runs:
    """Write repetitions once: a, b, a, b, a, b -> (a, b) three times. Fewer loops compile faster."""
    out: list[Any] = []
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
