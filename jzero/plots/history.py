"""The curves of one run, read from its ledger or from the file of `jsonl_monitor`."""

from __future__ import annotations

import contextlib
import math
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jzero.errors import ConfigError
from jzero.ledger import schema
from jzero.ledger.columns import CountingSteps, Record, Steps, number_array, stretches
from jzero.ledger.goodput import Account, Goodput, counted
from jzero.ledger.read import chunks_of, opened, runs, uncollected
from jzero.values.json_lines import as_objects, decode_float

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


class Curve(NamedTuple):
    """The values of a curve as columns: a run may have millions; `seconds` as in `Point`, or None for all."""

    step: np.ndarray
    samples: np.ndarray
    seconds: np.ndarray | None
    value: np.ndarray

    def take(self, rows: np.ndarray | list[int]) -> Curve:
        """Return some of its rows: those of a mask, or at indices."""
        seconds = None if self.seconds is None else self.seconds[rows]
        return Curve(self.step[rows], self.samples[rows], seconds, self.value[rows])

    def points(self) -> list[Point]:
        """Return them one by one."""
        seconds = [None] * len(self.step) if self.seconds is None else self.seconds.tolist()
        return list(map(Point, self.step.tolist(), self.samples.tolist(), seconds, self.value.tolist()))

    @property
    def last(self) -> Point:
        return self.take([-1]).points()[0]


class Restart(NamedTuple):
    """A later start of a run: the state that it continued from, when, and what had ended the one before."""

    at: Point
    reason: str


@dataclass(frozen=True)
class History:
    """The curves of one run.

    Attributes:
      name: in legends and tables.
      curves: {name: values}: the metrics, `eval_...` of evaluations, `samples/s`, `tokens/s`, `peak memory (GiB)`.
      speed: {"samples/s", "tokens/s": the mean}, as far as known, without the first step of each start.
      restarts: in order.
      goodput: None without a ledger.
      about: facts from the last start, such as the mesh.
    """

    name: str
    curves: dict[str, Curve]
    speed: dict[str, float] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)
    goodput: Goodput | None = None
    about: Record = field(default_factory=dict)

    @property
    def last(self) -> Point:
        """The last step, with its loss."""
        return self.curves[LOSS].last

    def __repr__(self) -> str:
        return f"History({self.name!r}, {self.last.step} steps, loss {self.last.value:.4g})"


@uncollected()
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
    if LOSS not in history.curves:
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
    """Read a ledger in parts: a million steps would take gigabytes at once."""
    # To check the types of a million steps takes seconds; columns with a step of other types fail by themselves.
    with contextlib.suppress(Exception):
        return _read(directory, name, unchecked=schema.STEP)
    return _read(directory, name)


def _read(directory: Path, name: str, unchecked: str = "") -> History:
    found = History(name, {})
    with opened(directory / schema.FILE) as file:
        for run in runs(stretches(chunks_of(file, unchecked))):
            found = _of_run(name, counted(run))
    return found


def _of_run(name: str, run: Iterable[Record | Steps]) -> History:
    account, steps, others = Account(), _CurvesOfSteps(), list[Record]()
    for record in run:
        account.take(record)
        if isinstance(record, Steps):
            steps.add(record)
            continue
        others.append(record)
        if record["kind"] == schema.STATE:
            steps.drop(record["step"] + 1)
        if record["kind"] in (schema.START, schema.STATE):
            steps.restart()
    starts = [record for record in others if record["kind"] == schema.START]
    origin = starts[0]["began"] if starts else 0.0
    curves, speed = steps.curves(origin)
    last = curves[LOSS].last.step if LOSS in curves else math.inf
    evaluations = _CurvesOfSteps()
    if alive := _alive([record for record in others if record["kind"] == schema.EVALUATION], last):
        evaluations.add_metrics(Steps(alive))
    curves |= {f"{EVAL}{metric}": curve for metric, curve in evaluations.curves(origin)[0].items()}
    about = starts[-1] if starts else {}
    return History(name, curves, speed, _restarts(others, origin), account.total(), about)


class _CurvesOfSteps:
    """The steps that count: the values of each metric, and what else each step recorded, with its start's number."""

    def __init__(self) -> None:
        self._metrics: dict[str, CountingSteps] = defaultdict(CountingSteps)
        self._steps, self._starts = CountingSteps(), 0

    def restart(self) -> None:
        """Note that the next step does not follow the last one."""
        self._starts += 1

    def add(self, steps: Steps) -> None:
        """Add steps, which supersede those from the first one on."""
        self.drop(steps.records[0]["step"])
        at = self.add_metrics(steps)
        peak, tokens = (steps.column(field, default=math.nan) for field in ("peak", "tokens"))
        self._steps.add(*at, peak, steps.column("rows"), tokens, np.full(len(peak), self._starts))

    def add_metrics(self, steps: Steps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Add the metrics alone; return where the records are: their steps, samples and times."""
        at = steps.column("step", "q"), steps.column("samples", "q"), steps.column("time")
        metrics = [record["metrics"] for record in steps.records]
        for name in dict.fromkeys(chain.from_iterable(metrics)):
            try:
                self._metrics[name].add(*at, _values(map(itemgetter(name), metrics)))
            except KeyError:
                has = [name in found for found in metrics]
                self._metrics[name].add(*(x[has] for x in at), _values(m[name] for m in metrics if name in m))
        return at

    def drop(self, step: int) -> None:
        """Drop the steps from this one on."""
        for table in (*self._metrics.values(), self._steps):
            table.drop(step)

    def curves(self, origin: float) -> tuple[dict[str, Curve], dict[str, float]]:
        """Return the curves, and the mean speeds."""
        curves = {
            name: Curve(step, samples, time - origin, value)
            for name, table in self._metrics.items()
            for step, samples, time, value in [table.columns() or [np.empty(0)] * 4]
            if step.size
        }
        if not (columns := self._steps.columns()):
            return curves, {}
        step, samples, time, peak, rows, tokens, start = columns
        if (has := ~np.isnan(peak)).any():
            curves[MEMORY] = Curve(step, samples, time - origin, peak / 2**30).take(has)
        # The first step of each start has no span, since nobody knows when it began. A step that ends when the one
        # before it does belongs to the next span.
        of_starts = np.split(time, np.flatnonzero(np.diff(start)) + 1)
        seconds = time - np.concatenate([np.append(math.nan, np.fmax.accumulate(x[:-1])) for x in of_starts])
        ends = np.flatnonzero(~(seconds <= 0))
        begins = np.append(0, ends[:-1] + 1)
        rows, tokens = (np.add.reduceat(x[: ends[-1] + 1], begins) for x in (rows, tokens))
        known = seconds[ends] > 0
        if not known.any():
            return curves, {}
        spans = rows[known], tokens[known], seconds[ends][known]
        first, ends = _chunks(spans[-1]), ends[known]
        last = ends[[*(i - 1 for i in first[1:]), -1]]
        for name, values in _speeds(first, *spans).items():
            if (has := ~np.isnan(values)).any():
                curves[name] = Curve(step[last], samples[last], time[last] - origin, values).take(has)
        return curves, {name: x.item() for name, x in _speeds([0], *spans).items() if not np.isnan(x)}


def _values(metric: Iterable[Any]) -> np.ndarray:
    """Return the values of a metric, which are strings where they are not finite."""
    found = list(metric)
    try:
        return number_array(found)
    except TypeError:
        return number_array(map(decode_float, found))


def _alive(records: Iterable[Record], last: float) -> list[Record]:
    """Return the evaluations that count: those up to the last step that no later one has superseded."""
    found: list[Record] = []
    for record in records:
        while found and found[-1]["step"] >= record["step"] and found[-1]["time"] < record["time"]:
            found.pop()
        found.append(record)
    return [record for record in found if record["step"] <= last]


def _chunks(seconds: np.ndarray) -> list[int]:
    """Divide spans into points of a curve: return each one's first span; what is left belongs to the last point."""
    size, first = -(-len(seconds) // MOST), [0]
    end = size

    def is_enough() -> bool:
        return end - first[-1] >= FEWEST or sum(seconds[first[-1] : end]) >= SHORTEST

    while end < len(seconds):
        if is_enough():
            first.append(end)
            end += size
        else:
            end += 1
    end = len(seconds)
    if first[1:] and not is_enough():
        first.pop()
    return first


def _speeds(first: list[int], rows: np.ndarray, tokens: np.ndarray, seconds: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mean speeds in spans, from each of `first` to the next; NaN where a step does not know its tokens."""
    rows, tokens, seconds = (np.add.reduceat(x, first) for x in (rows, tokens, seconds))
    return {SPEED: rows / seconds, TOKENS: tokens / seconds}


def _restarts(records: Iterable[Record], origin: float) -> list[Restart]:
    """Return the starts after the first, each with the state that it continued from."""
    found: list[Restart] = []
    reason, starts, fresh = "", 0, False
    for record in records:
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


def _of_metrics(file: Path) -> dict[str, Curve]:
    """Read curves by DeepSpeed's event names; a step that is repeated supersedes those from it on."""
    curves: dict[str, list[tuple[int, int, float]]] = {}
    for record in as_objects(file.read_text(errors="replace").splitlines()):
        step, samples = record.pop("step", None), record.pop("samples", None)
        if not schema.is_count(step) or not schema.is_count(samples):  # torn by a kill, or no line of jsonl_monitor
            continue
        for event, value in record.items():
            if not schema.is_metric(value := decode_float(value)):
                continue
            metric = event.rpartition("/")[2]
            rows = curves.setdefault(LOSS if metric == "train_loss" else metric, [])
            while rows and rows[-1][0] >= step:
                rows.pop()
            rows.append((step, samples, value))
    columns = {metric: tuple(zip(*rows, strict=True)) for metric, rows in curves.items()}
    return {m: Curve(np.array(step), np.array(at), None, np.array(x, float)) for m, (step, at, x) in columns.items()}
