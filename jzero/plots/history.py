"""The curves of one run, read from its ledger or from the file of `jsonl_monitor`."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from jzero import ledger
from jzero.errors import ConfigError
from jzero.ledger import schema
from jzero.ledger.goodput import Goodput, counted
from jzero.values.json_lines import number

METRICS = "metrics.jsonl"  # of jsonl_monitor
SPEED, TOKENS, MEMORY = "samples/s", "tokens/s", "peak memory (GiB)"
LOSS, EVAL = "loss", "eval_"
MOST = 100  # points of a curve of the speed: each is a mean over its steps
FEWEST, SHORTEST = 5, 0.5  # steps or seconds of a point at least: the results of two steps may be read at once
CLAUSE = 160  # characters of a reason


class Point(NamedTuple):
    """A value of a curve and where the run was; `seconds` since the first start, None if nobody recorded them."""

    step: int
    samples: int
    seconds: float | None
    value: float


class Restart(NamedTuple):
    """A later start of a run: the state that it continued from, when, and what had ended the one before."""

    at: Point
    reason: str


@dataclass(frozen=True)
class History:
    """The curves of one run.

    Attributes:
      name: in legends and tables.
      curves: {name: points}: the metrics, `eval_...` of evaluations, `samples/s`, `tokens/s`, `peak memory (GiB)`.
      speed: {"samples/s", "tokens/s": the mean}, as far as known, without the first step of each start.
      restarts: in order.
      goodput: None without a ledger.
      about: facts from the last start, such as the mesh.
    """

    name: str
    curves: dict[str, list[Point]]
    speed: dict[str, float] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)
    goodput: Goodput | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> Point:
        """The last step, with its loss."""
        return self.curves[LOSS][-1]

    def __repr__(self) -> str:
        return f"History({self.name!r}, {self.last.step} steps, loss {self.last.value:.4g})"


def read_run(run: str | os.PathLike, name: str | None = None) -> History:
    """Read a run: a checkpoint directory with a ledger, or a directory or file of `jsonl_monitor`.

    Raises:
      ConfigError: there is no such run, or no step in its records.
    """
    path = _place(run)
    name = name or path.name
    if (path / schema.FILE).is_file():
        history = _of_ledger(path, name)
    elif (file := path if path.is_file() else path / METRICS).is_file():
        history = History(name, _of_metrics(file))
    elif not path.exists():
        raise ConfigError(f"{run}: no such directory or file")
    else:
        raise ConfigError(
            f"{run}: has no records of a run ({schema.FILE} or {METRICS}): set checkpoint.dir in the config, or pass "
            "resume= to initialize, for a ledger; or turn on jsonl_monitor"
        )
    if not history.curves.get(LOSS):
        raise ConfigError(f"{run}: its records contain no step with a loss yet; plot the run once it has finished one")
    return history


def read_all(runs: Sequence[str | os.PathLike]) -> list[History]:
    """Read runs, and name them by their directories; by their paths, if two directories have one name."""
    places = {_place(run): str(run) for run in runs}
    names = [place.name for place in places]
    return [read_run(run, place.name if names.count(place.name) == 1 else run) for place, run in places.items()]


def _place(run: str | os.PathLike) -> Path:
    """Return the directory of a ledger, or a directory or file of `jsonl_monitor`."""
    path = Path(run).expanduser().absolute()
    return path.parent if path.name == schema.FILE else path


# ------------------------------------------------------------------ from a ledger


def _of_ledger(directory: Path, name: str) -> History:
    run = ledger.read(directory)
    run = replace(run, records=counted(run.records))
    starts = run.of(schema.START)
    origin = starts[0]["began"] if starts else 0.0
    curves: dict[str, list[Point]] = {}
    for step in run.steps.values():
        for metric, value in step.metrics.items():
            curves.setdefault(metric, []).append(Point(step.step, step.samples, step.time - origin, value))
    for record in _alive(run.of(schema.EVALUATION), run):
        for metric, value in record["metrics"].items():
            point = Point(record["step"], record["samples"], record["time"] - origin, value)
            curves.setdefault(f"{EVAL}{metric}", []).append(point)
    spans = _spans(run)
    for unit in (SPEED, TOKENS):
        curves[unit] = [
            Point(chunk[-1].step, chunk[-1].samples, chunk[-1].end - origin, _speed(chunk)[unit])
            for chunk in _chunks(spans)
            if unit in _speed(chunk)
        ]
    curves[MEMORY] = [
        Point(r["step"], r["samples"], r["time"] - origin, r["peak"] / 2**30)
        for r in _alive(run.of(schema.STEP), run)
        if "peak" in r
    ]
    return History(
        name, {metric: points for metric, points in curves.items() if points}, _speed(spans),
        _restarts(run, origin), run.goodput, starts[-1] if starts else {},
    )  # fmt: skip


def _alive(records: Iterable[dict[str, Any]], run: ledger.Run) -> list[dict[str, Any]]:
    """Return the records of steps that count: those that no later state has superseded."""
    found: list[dict[str, Any]] = []
    for record in records:
        while found and found[-1]["step"] >= record["step"] and found[-1]["time"] < record["time"]:
            found.pop()
        found.append(record)
    return [record for record in found if not run.steps or record["step"] <= max(run.steps)]


class _Span(NamedTuple):
    """Steps that follow each other in one start: the last one, what they took in (tokens -1: unknown), the seconds."""

    step: int
    samples: int
    end: float
    rows: int
    tokens: int
    seconds: float


def _spans(run: ledger.Run) -> list[_Span]:
    """Return the steps that count and whose begin is known: all but the first of each start."""
    found, before, rows, tokens = [], None, 0, 0
    for record in run.records:
        if record["kind"] in (schema.START, schema.STATE):
            before = None
        elif record["kind"] == schema.STEP:
            rows += record["rows"]
            tokens = tokens + record["tokens"] if "tokens" in record and tokens >= 0 else -1
            counts = record["step"] in run.steps and run.steps[record["step"]].time == record["time"]
            if before is None or not counts:
                before, rows, tokens = record["time"], 0, 0
            elif record["time"] > before:
                seconds = record["time"] - before
                found.append(_Span(record["step"], record["samples"], record["time"], rows, tokens, seconds))
                before, rows, tokens = record["time"], 0, 0
    return found


def _chunks(spans: list[_Span]) -> list[list[_Span]]:
    """Divide the spans into points of a curve; what is left at the end belongs to the last one."""
    size = -(-len(spans) // MOST)
    found: list[list[_Span]] = [[]]
    for span in spans:
        if _is_full(found[-1], size):
            found.append([])
        found[-1].append(span)
    if found[1:] and not _is_full(found[-1], 1):
        rest = found.pop()
        found[-1].extend(rest)
    return [chunk for chunk in found if chunk]


def _is_full(spans: list[_Span], size: int) -> bool:
    return len(spans) >= size and (len(spans) >= FEWEST or sum(span.seconds for span in spans) >= SHORTEST)


def _speed(spans: list[_Span]) -> dict[str, float]:
    """Return the mean speed in each unit that all steps know."""
    seconds = sum(span.seconds for span in spans)
    speed = {SPEED: sum(span.rows for span in spans) / seconds} if spans else {}
    if spans and all(span.tokens >= 0 for span in spans):
        speed[TOKENS] = sum(span.tokens for span in spans) / seconds
    return speed


def _restarts(run: ledger.Run, origin: float) -> list[Restart]:
    """Return the starts after the first, each with the state that it continued from."""
    found: list[Restart] = []
    reason, starts, fresh = "", 0, False
    for record in run.records:
        if record["kind"] == schema.FAILURE:
            reason = record["reason"]
        elif record["kind"] == schema.END:
            reason = record["reason"] or "the script had ended"
        elif record["kind"] == schema.START:
            starts, fresh = starts + 1, True
        elif record["kind"] == schema.STATE and fresh:
            if starts > 1:
                at = Point(record["step"], record["samples"], record["time"] - origin, 0.0)
                found.append(Restart(at, _clause(reason) or "the process was gone"))
            reason, fresh = "", False
    return found


def _clause(reason: str) -> str:
    """Return the first clause of a reason; the ledger has all of it.

    >>> _clause("ValueError: the rank is 8, not 4; pass rank=4")
    'ValueError: the rank is 8, not 4'
    """
    return textwrap.shorten(re.split(r"[;.] ", reason)[0], CLAUSE, placeholder=" ...")


# ------------------------------------------------------------------ from the file of jsonl_monitor


def _of_metrics(file: Path) -> dict[str, list[Point]]:
    """Read curves by DeepSpeed's event names; a step that is repeated supersedes those from it on."""
    curves: dict[str, list[Point]] = {}
    for line in file.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
            step, samples = record.pop("step"), record.pop("samples")
        except (ValueError, KeyError, AttributeError, TypeError):  # torn by a kill, or no line of jsonl_monitor
            continue
        for event, value in record.items():
            metric = event.rpartition("/")[2]
            points = curves.setdefault(LOSS if metric == "train_loss" else metric, [])
            while points and points[-1].step >= step:
                points.pop()
            points.append(Point(step, samples, None, number(value)))
    return curves
