"""Steps as columns of numbers: a long run has millions, and Python takes a microsecond for each thing done to one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from jzero.ledger import schema

Record = dict[str, Any]


def number_array(values: Iterable[float], kind: str = "d") -> np.ndarray:
    """Return numbers as an array: the kind "d" takes any, "q" integers.

    Raises:
      TypeError: one is of another type.
    """
    return np.asarray(array(kind, list(values)))


class Steps:
    """Records of steps that follow each other, with ascending numbers."""

    def __init__(self, records: list[Record]):
        self.records = records
        self._fields = set[str]().union(*records)
        self._columns: dict[str, np.ndarray] = {}

    def column(self, field: str, kind: str = "d", default: float | None = None) -> np.ndarray:
        """Return a field of all records; where a record has none, the default.

        Raises:
          KeyError, TypeError: a record has no such field and there is no default, or a value is of another type.

        >>> Steps([{"step": 3, "peak": 8}, {"step": 4}]).column("peak", default=0.0)
        array([8., 0.])
        """
        if field not in self._columns:
            if default is not None and field not in self._fields:
                values = [default] * len(self.records)
            else:
                try:
                    values = list(map(itemgetter(field), self.records))
                except KeyError:
                    if default is None:
                        raise
                    values = [record.get(field, default) for record in self.records]
            self._columns[field] = number_array(values, kind)
        return self._columns[field]

    def seconds(self, field: str, default: float | None = None) -> np.ndarray:
        """Return a field of times, see `column`.

        Raises:
          TypeError: a value is no time, finite and below `schema.LATEST`.
        """
        found = self.column(field, default=default)
        if not (np.abs(found) < schema.LATEST).all():  # NaN is no time either
            raise TypeError(f"{field} is not a time")
        return found


def stretches(chunks: Iterable[list[Record]]) -> Iterator[Record | Steps]:
    """Join the steps among the records of each chunk, in order; other records come as they are."""
    for kind, alike in chain.from_iterable(groupby(chunk, itemgetter("kind")) for chunk in chunks):
        if kind != schema.STEP:
            yield from alike
            continue
        part = list(alike)
        number = number_array(map(itemgetter("step"), part), "q")
        for first, end in pairwise((0, *np.flatnonzero(np.diff(number) <= 0) + 1, len(part))):
            yield Steps(part[first:end])


class CountingSteps:
    """Columns of the steps that count: no later state or step has superseded them. The first column is their number."""

    def __init__(self) -> None:
        self._blocks: list[tuple[np.ndarray, ...]] = []

    def add(self, *columns: np.ndarray) -> None:
        """Add steps after all others; views of these arrays are kept."""
        if columns[0].size:
            self._blocks.append(columns)

    def drop(self, first: int) -> list[tuple[np.ndarray, ...]]:
        """Drop the steps from a number on; return their columns."""
        dropped = []
        while self._blocks and self._blocks[-1][0][-1] >= first:
            block = self._blocks.pop()
            kept = int(np.searchsorted(block[0], first))
            self.add(*(x[:kept] for x in block))
            dropped.append(tuple(x[kept:] for x in block))
        return dropped

    def columns(self) -> list[np.ndarray]:
        """Return the columns of all; [] without steps."""
        return [np.concatenate(parts) for parts in zip(*self._blocks, strict=True)]
