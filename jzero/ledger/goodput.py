"""Goodput: the share of a run's wall time that its steps took, and what the rest went to.

The wall time goes from the first start of the run to the last step, evaluation or save. It leaves out the pause between
the last activity of a script that ended in order and the next start. A start that never had a state, such as one that a
mistake in the config ended, is part of the pause around it, unless a launcher saw it fail. Every other second belongs
to one line of the table, so the lines add up to the wall time. A step begins when the devices have finished the one
before and have been given this one, and ends when it is computed. It counts once: the time of a step that a resume
takes again is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from jzero.ledger import schema
from jzero.ledger.columns import CountingSteps, Record, Steps, stretches

# What time is lost to -> what it means. The order of the table.
LOSSES = {
    "repeated steps": "steps after the checkpoint that a later start resumed, and the one that a failure cut",
    "detect": "from the last sign of life to the launcher's notice",
    "restart": "from there to the next call of initialize",
    "stopped": "from the last activity before an error, a signal or a kill to the next start, without a launcher",
    "start": "initialize, without the read of a checkpoint or of weights",
    "restore": "the read of a checkpoint or of weights, or the search of a step that was not finite and the way back",
    "compile": "tracing and compiling programs",
    "first step": "extra time of each start's first step over its median step",
    "save": "saves that the devices waited for",
    "evaluation": "evaluations",
    "data": "waiting for training data, with idle devices",
    "script": "the script between two steps, with idle devices",
}
_GAPS = {
    "compile_before": "compile",
    "save": "save",
    "evaluation": "evaluation",
    "wait": "data",
}  # field of a step -> line of the table


@dataclass(frozen=True)
class Goodput:
    """The wall time of a run by its use, in seconds.

    Attributes:
      wall: from the first start to the last activity, without the pauses after a script that ended in order.
      steps: in steps that count.
      lost: {line of LOSSES: seconds}, without lines of 0.
    """

    wall: float
    steps: float
    lost: dict[str, float]

    @property
    def share(self) -> float:
        """The share of the wall time in steps that count."""
        return self.steps / self.wall if self.wall > 0 else 0.0

    def __str__(self) -> str:
        """Format one line.

        >>> print(Goodput(200.0, 150.0, {"compile": 40.0, "restart": 9.0, "save": 1.0}))
        goodput 75.0% of 3 min 20 s; lost: compile 20.0%, restart 4.5%, save 0.5%
        """
        shares = sorted(((x / self.wall, name) for name, x in self.lost.items()), reverse=True) if self.wall > 0 else []
        listed = ", ".join(f"{name} {100 * share:.1f}%" for share, name in shares if share >= 5e-4)
        return f"goodput {100 * self.share:.1f}% of {duration(self.wall)}" + (f"; lost: {listed}" if listed else "")


def duration(seconds: float) -> str:
    """Write a time as one reads it.

    >>> duration(0.42), duration(12.34), duration(125), duration(11_100), duration(400_000)
    ('0.4 s', '12.3 s', '2 min 5 s', '3 h 5 min', '4 d 15 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def goodput(records: Iterable[Record]) -> Goodput:
    """Compute the goodput of a run from its records, in the order of the file."""
    account = Account()
    for one in counted(stretches([list(records)])):
        account.take(one)
    return account.total()


def counted(found: Iterable[Record | Steps]) -> Iterator[Record | Steps]:
    """Leave out each start that never had a state, with its end, unless a launcher saw it fail and repeated it.

    Args:
      found: `columns.stretches` of a run.
    """
    part: list[Record] = []  # a start, and what follows it until there is a state
    for one in found:
        if isinstance(one, Steps) or one["kind"] == schema.STATE:
            yield from part
            part = []
            yield one
        elif one["kind"] == schema.START:
            yield from _without_state(part)
            part = [one]
        elif part:
            part.append(one)
        else:
            yield one
    yield from _without_state(part)


def _without_state(part: list[Record]) -> list[Record]:
    failures = [record for record in part if record["kind"] == schema.FAILURE]  # before the next start
    was_repeated = part and part[0].get("attempt") in {record["attempt"] for record in failures}
    return part if was_repeated else failures


@dataclass
class Account:
    """Computes the goodput. Time up to `mark` is booked; each record books the time from there to its own."""

    origin: float | None = None
    mark: float = 0.0
    left_out: float = 0.0  # seconds after scripts that ended in order
    done: bool = False  # whether the script of the last start ended in order
    lost: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counting: CountingSteps = field(default_factory=CountingSteps)  # with their seconds
    superseded: list[np.ndarray] = field(default_factory=list)  # seconds of steps that no longer count
    of_start: list[np.ndarray] = field(default_factory=list)  # seconds of the last start's steps
    tail: list[Record] = field(default_factory=list)  # evaluations and saves since the last step
    outages: list[Record] = field(default_factory=list)  # since the last start
    known: set[str] = field(default_factory=set)  # attempts whose failure is booked

    def take(self, record: Record | Steps) -> None:
        """Book a record, or steps."""
        if isinstance(record, Steps):
            return self.steps(record)
        kind = record["kind"]
        if kind == schema.START:
            self.start(record)
        elif kind == schema.STATE:
            self.book("restore" if record["from"] is not None else "start", record["time"])
            self.supersede(record["step"] + 1)
        elif kind in (schema.EVALUATION, schema.SAVE):
            self.tail.append(record)
        elif kind == schema.FAILURE and record["attempt"] not in self.known:
            self.outages.append(record)
        elif kind == schema.END:
            self.done = record["reason"] == ""

    def book(self, line: str, until: float) -> None:
        """Book the time from the mark to `until`; clocks of two hosts may differ, so it may be earlier."""
        if until > self.mark:
            self.lost[line] += until - self.mark
            self.mark = until

    def start(self, record: Record) -> None:
        self.first_step()
        if self.origin is None:
            self.origin = self.mark = record["began"]
        self.end_tail()
        if self.done and not self.outages and record["began"] > self.mark:
            self.left_out += record["began"] - self.mark
            self.mark = record["began"]
        if self.outages:
            self.book("repeated steps", self.outages[0]["died"])
            self.book("detect", self.outages[0]["time"])
        self.book("restart" if self.outages else "stopped", record["began"])
        self.book("start", record["time"])
        self.known |= {outage["attempt"] for outage in self.outages}
        self.outages.clear()
        self.done = False

    def steps(self, steps: Steps) -> None:
        """Book steps: their marks move as that of `book`."""
        self.tail.clear()
        number, end = steps.column("step", "q"), steps.seconds("time")
        begin = np.minimum(steps.seconds("began"), end)
        marks = np.maximum.accumulate(np.append(self.mark, end[:-1]))
        self.mark = float(max(marks[-1], end[-1]))

        def book(line: str, until: np.ndarray) -> None:
            nonlocal marks
            self.lost[line] += float(np.maximum(until - marks, 0.0).sum())
            marks = np.maximum(marks, until)

        for name, line in _GAPS.items():
            book(line, np.minimum(begin, marks + steps.seconds(name, default=0.0)))
        book("script", begin)
        book("compile", np.minimum(end, marks + steps.seconds("compile", default=0.0)))
        seconds = np.maximum(end - marks, 0.0)
        self.supersede(number[0])
        self.of_start.append(seconds)
        self.counting.add(number, seconds)

    def supersede(self, first: int) -> None:
        """Let the steps from a number on no longer count."""
        self.superseded += [seconds for _, seconds in self.counting.drop(first)]

    def end_tail(self) -> None:
        """Book what came after the last step."""
        for record in sorted(self.tail, key=lambda one: one["time"]):
            self.book("script", min(record["began"], record["time"]))
            self.book("save" if record["kind"] == schema.SAVE else "evaluation", record["time"])
        self.tail.clear()

    def first_step(self) -> None:
        """Move what the first step of a start took longer than its others to its own line, at the end of the start."""
        if self.origin is not None and sum(map(len, self.of_start)) > 2:
            seconds = np.concatenate(self.of_start)
            extra = max(0.0, float(seconds[0] - np.median(seconds[1:])))
            self.of_start[0][0] -= extra  # and so in `counting` or `superseded`, which have views of it
            self.lost["first step"] += extra
        self.of_start = []

    def total(self) -> Goodput:
        """Return the result; the account is closed then."""
        self.end_tail()
        self.first_step()
        _, seconds = self.counting.columns() or ((), np.zeros(()))
        self.lost["repeated steps"] += float(sum(part.sum() for part in self.superseded))
        wall = 0.0 if self.origin is None else self.mark - self.origin - self.left_out
        return Goodput(wall, float(seconds.sum()), {line: self.lost[line] for line in LOSSES if self.lost[line]})
