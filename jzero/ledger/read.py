"""Reads a ledger: the steps that count, what happened between them, and the rows of the data that a step saw."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from jzero.errors import ConfigError
from jzero.ledger import schema
from jzero.ledger.columns import Record, Steps
from jzero.ledger.goodput import Goodput, goodput
from jzero.ledger.writer import wait_for_appends
from jzero.values.json_lines import as_objects, decode_float

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1000  # lines to decode at once


class Step(NamedTuple):
    """A step that counts.

    Attributes:
      step, samples: their numbers since step 0.
      time: when it was computed, in UTC seconds.
      rows: samples of this step.
      metrics: {name: value}, as `engine.metrics`.
      data: the positions of the loader before and after the step; None if its batch came from elsewhere.
      order: what the positions depend on, as `loader.order`.
    """

    step: int
    samples: int
    time: float
    rows: int
    metrics: dict[str, float]
    data: list[list[int]] | None
    order: dict[str, Any] | None


@dataclass(frozen=True)
class Run:
    """The run of a ledger.

    Attributes:
      directory: of the checkpoints.
      records: all records of the run, in order; `jzero.ledger.schema` describes them.
      steps: {number: the step}, each once, of the last time that it ran.
    """

    directory: Path
    records: list[Record]
    steps: dict[int, Step]

    def of(self, kind: str) -> list[Record]:
        """Return the records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def failures(self) -> list[Record]:
        """The failures that the launcher has seen, each once."""
        return list({record["attempt"]: record for record in self.of(schema.FAILURE)}.values())

    @property
    def goodput(self) -> Goodput:
        """The run's wall time by its use."""
        return goodput(self.records)

    def rows(self, step: int) -> np.ndarray:
        """Return the indices of the training data's rows in a step's global batch, in their order.

        Raises:
          ConfigError: no such step counts, or its batch did not come from the engine's loader alone.
        """
        if step not in self.steps:
            known = f"{min(self.steps)} to {max(self.steps)}" if self.steps else "none"
            raise ConfigError(f"rows({step}): the ledger of {self.directory} has no such step; its steps: {known}")
        return rows_of(self.steps[step])

    def __repr__(self) -> str:
        starts = len(self.of(schema.START))
        return f"Run({str(self.directory)!r}, {len(self.steps)} steps, {starts} starts, {self.goodput})"


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's search for cycles: a ledger has none, but millions of objects, and the search doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def read(directory: str | os.PathLike) -> Run:
    """Read the ledger of a checkpoint directory; of several runs in it, the last one's.

    Raises:
      ConfigError: there is no ledger.
    """
    path = Path(directory).expanduser() / schema.FILE
    records: list[Record] = []
    with opened(path) as file:
        for record in chain.from_iterable(chunks_of(file)):
            if record["kind"] == schema.START and record["new"]:
                records.clear()
            records.append(record)
    return Run(path.parent, records, steps_of(records))


def opened(path: Path) -> TextIO:
    """Open a ledger, after this process has written what it knows.

    Raises:
      ConfigError: there is no ledger.
    """
    wait_for_appends(path)
    try:
        return path.open(errors="replace", newline="\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; a run writes its ledger if the config names checkpoint.dir, or initialize a "
            "directory to resume from"
        ) from None


def chunks_of(lines: Iterable[str], unchecked: str = "") -> Iterator[list[Record]]:
    """Yield the records in lines, many at once; skip what is no record: a kill tears one, a later version adds kinds.

    Args:
      unchecked: a kind whose records come as they are: fields may be missing or have any type.

    >>> list(chunks_of(['{"kind": "end", "time": 1.0, "step": 3, "reason": ""}', '{"kind": "end", "ti']))
    [[{'kind': 'end', 'time': 1.0, 'step': 3, 'reason': ''}]]
    """
    lines = iter(lines)
    while chunk := list(islice(lines, CHUNK)):
        yield [x for x in as_objects(chunk) if (unchecked and x.get("kind") == unchecked) or _is_record(x)]


def _is_record(x: Record) -> bool:
    """Decode the metrics of an object, and return whether it is a record."""
    if isinstance(metrics := x.get("metrics"), dict):
        x["metrics"] = {name: decode_float(value) for name, value in metrics.items()}
    return schema.is_record(x)


def runs(found: Iterable[Record | Steps]) -> Iterator[Iterator[Record | Steps]]:
    """Divide `columns.stretches` into runs, one after the other: a start that is new begins one."""
    count = 0

    def run_of(one: Record | Steps) -> int:
        nonlocal count
        count += not isinstance(one, Steps) and one["kind"] == schema.START and bool(one["new"])
        return count

    return (run for _, run in groupby(found, run_of))


def steps_of(records: Iterable[Mapping[str, Any]]) -> dict[int, Step]:
    """Return the steps that count, by number: a state and a repeated step supersede those that came before them."""
    steps: dict[int, Step] = {}
    order = None
    for record in records:
        if record["kind"] not in (schema.STATE, schema.STEP):
            continue
        first = record["step"] + (record["kind"] == schema.STATE)
        while steps and next(reversed(steps)) >= first:
            steps.popitem()
        if record["kind"] == schema.STATE:
            order = record.get("order")
        else:
            steps[first] = Step(
                first, record["samples"], record["time"], record["rows"], record["metrics"], record.get("data"), order
            )
    return steps


def rows_of(step: Step) -> np.ndarray:
    """Compute the rows of a step from its positions: the order of an epoch depends on the seed and the numbers alone.

    Raises:
      ConfigError: the positions do not tell.
    """
    import numpy as np

    from jzero.data.order import shuffled

    if not step.data or None in step.data or step.order is None:
        raise ConfigError(f"step {step.step}: its batch did not come from training_data, so the ledger has no rows")
    (epoch, samples, *_), (end_epoch, end_samples, *_) = step.data
    parts = [(epoch, samples, step.rows)]
    if end_epoch == epoch + 1:  # the rest belongs to the next epoch
        parts = [(epoch, samples, step.rows - end_samples), (end_epoch, 0, end_samples)]
    elif end_epoch != epoch or end_samples - samples != step.rows:
        raise ConfigError(
            f"step {step.step}: the loader went from {step.data[0]} to {step.data[1]}, which are not the {step.rows} "
            "samples of the step: the script moved the loader between steps"
        )
    length, seed = step.order["samples"], step.order["seed"]
    if length is None and end_epoch != epoch and not step.order["drop_last"]:
        raise ConfigError(
            f"step {step.step} ends an epoch of data without a length, which fills up its last batch with rows that "
            "only a read of the data shows"
        )
    found = []
    for its_number, first, count in parts:
        rows = np.arange(first, first + count) % (length or max(first + count, 1))
        found.append(rows if seed is None else shuffled(rows, length, seed, its_number))
    return np.concatenate(found)
