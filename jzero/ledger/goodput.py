"""Goodput: the share of a run's wall time that its steps took, and what the rest went to.

The wall time goes from the first start of the run to the last step, evaluation or save. It leaves out the pause between
the last activity of a script that ended in order and the next start. A start that never had a state, such as one that a
mistake in the config ended, is part of the pause around it, unless a launcher saw it fail. Every other second belongs
to one line of the table, so the lines add up to the wall time. A step begins when the devices have finished the one
before and have been given this one, and ends when it is computed. It counts once: the time of a step that a resume
takes again is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from jzero.ledger import schema

# What time is lost to -> what it means. The order of the table.
LOSSES = {
    "repeated steps": "steps after the checkpoint that a later start resumed, and the one that a failure cut",
    "detect": "from the last sign of life to the launcher's notice",
    "restart": "from there to the next call of initialize",
    "stopped": "from the last activity before an error, a signal or a kill to the next start, without a launcher",
    "start": "initialize, without the read of a checkpoint or of weights",
    "restore": "the read of a checkpoint or of weights, or the search of a step that was not finite and the way back",
    "compile": "tracing and compiling programs",
    "first step": "what the first step of a start took longer than the median of that start's others",
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


Record = TypeVar("Record", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went, in seconds.

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


def goodput(records: Iterable[Mapping[str, Any]]) -> Goodput:
    """Compute the goodput of a run from its records, in the order of the file."""
    account = _Account()
    for record in counted(records):
        account.take(record)
    return account.total()


def counted(records: Iterable[Record]) -> list[Record]:
    """Leave out each start that never had a state, with its end, unless a launcher saw it fail and repeated it."""
    records = list(records)
    failed = {record["attempt"] for record in records if record["kind"] == schema.FAILURE}
    parts: list[list[Record]] = [[]]  # the first precedes all starts
    for record in records:
        if record["kind"] == schema.START:
            parts.append([])
        parts[-1].append(record)
    for part in parts[1:]:
        has_state = any(record["kind"] in (schema.STATE, schema.STEP) for record in part)
        if not has_state and part[0].get("attempt") not in failed:
            part[:] = [record for record in part if record["kind"] == schema.FAILURE]  # before the next start
    return [record for part in parts for record in part]


@dataclass
class _Work:
    """A step: its number, the start that ran it, its seconds, and whether it counts."""

    number: int
    start: int
    seconds: float
    counts: bool = True


@dataclass
class _Account:
    """Time up to `mark` is booked; each record books the time from there to its own."""

    origin: float | None = None
    mark: float = 0.0
    left_out: float = 0.0  # seconds after scripts that ended in order
    done: bool = False  # whether the script of the last start ended in order
    starts: int = 0
    lost: dict[str, float] = field(default_factory=dict)
    works: list[_Work] = field(default_factory=list)
    tail: list[Mapping[str, Any]] = field(default_factory=list)  # evaluations and saves since the last step
    outages: list[Mapping[str, Any]] = field(default_factory=list)  # since the last start
    known: set[str] = field(default_factory=set)  # attempts whose failure is booked

    def take(self, record: Mapping[str, Any]) -> None:
        """Book one record."""
        kind = record["kind"]
        if kind == schema.START:
            self.start(record)
        elif kind == schema.STATE:
            self.book("restore" if record["from"] is not None else "start", record["time"])
            self.supersede(record["step"])
        elif kind == schema.STEP:
            self.step(record)
        elif kind in (schema.EVALUATION, schema.SAVE):
            self.tail.append(record)
        elif kind == schema.FAILURE and record["attempt"] not in self.known:
            self.outages.append(record)
        elif kind == schema.END:
            self.done = record["reason"] == ""

    def book(self, line: str, until: float) -> None:
        """Book the time from the mark to `until`; clocks of two hosts may differ, so it may be earlier."""
        if until > self.mark:
            self.lost[line] = self.lost.get(line, 0.0) + until - self.mark
            self.mark = until

    def start(self, record: Mapping[str, Any]) -> None:
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
        self.starts += 1

    def step(self, record: Mapping[str, Any]) -> None:
        self.tail.clear()
        begin = min(max(self.mark, record["began"]), record["time"])
        for name, line in _GAPS.items():
            self.book(line, min(begin, self.mark + record.get(name, 0.0)))
        self.book("script", begin)
        self.book("compile", min(record["time"], self.mark + record.get("compile", 0.0)))
        self.supersede(record["step"] - 1)
        self.works.append(_Work(record["step"], self.starts, max(0.0, record["time"] - self.mark)))
        self.mark = max(self.mark, record["time"])

    def supersede(self, step: int) -> None:
        """Mark later steps as superseded."""
        for work in reversed(self.works):
            if work.number <= step:
                break
            work.counts = False

    def end_tail(self) -> None:
        """Book what came after the last step."""
        for record in sorted(self.tail, key=lambda one: one["time"]):
            self.book("script", min(record["began"], record["time"]))
            self.book("save" if record["kind"] == schema.SAVE else "evaluation", record["time"])
        self.tail.clear()

    def first_steps(self) -> None:
        """Move what the first step of each start took longer than the others to its own line."""
        for start in range(1, self.starts + 1):
            mine = [work for work in self.works if work.start == start]
            if len(mine) > 2:
                extra = max(0.0, mine[0].seconds - median(work.seconds for work in mine[1:]))
                mine[0].seconds -= extra
                self.lost["first step"] = self.lost.get("first step", 0.0) + extra

    def total(self) -> Goodput:
        """Return the result; the account is closed then."""
        self.end_tail()
        self.first_steps()
        steps = sum(work.seconds for work in self.works if work.counts)
        if repeated := sum(work.seconds for work in self.works if not work.counts):
            self.lost["repeated steps"] = self.lost.get("repeated steps", 0.0) + repeated
        wall = 0.0 if self.origin is None else self.mark - self.origin - self.left_out
        return Goodput(wall, steps, {line: self.lost[line] for line in LOSSES if self.lost.get(line)})
