"""The search for what is not finite in a step: parameters, then the forward pass, then the backward pass, then rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jzero.errors import some_of
from jzero.run.diagnosis.finding import BACKWARD, FORWARD, Finding, bad_parameters
from jzero.run.diagnosis.repeat import Repeat
from jzero.tree import PyTree


def find_non_finite(repeat: Repeat, found: Finding, first: int = 0) -> Finding:
    """Repeat a step in parts, and find where it is not finite. All processes call it.

    Args:
      found: the step's number and loss.
      first: the index of the first micro-batch.

    Returns:
      `found`, completed; its rows are those of the micro-batch, in the order of the devices.
    """
    found = replace(found, parameters=tuple(bad_parameters(repeat.setup, repeat.state.params)))
    seen = np.stack([repeat.forward(repeat.micro_batch(i), first + i) for i in range(repeat.accum)])
    lost = ~np.isfinite(seen[..., -1])  # [accum, replicas]: whose loss
    if lost.any():
        return _forward(repeat, found, seen, lost, first)
    for index in range(repeat.accum):
        part = repeat.micro_batch(index)
        gradients = repeat.backward(part, first + index)
        if not _finite(gradients):
            return _backward(repeat, found, part, index, first, gradients)
    return found


def _forward(repeat: Repeat, found: Finding, seen: np.ndarray, lost: np.ndarray, first: int) -> Finding:
    """Complete the finding of a loss that is not finite; `seen` is [accum, replicas, places]."""
    index = int(np.flatnonzero(lost.any(1))[0])
    # Some models pass on infinities, such as masks: what is not finite where the loss is finite does not count.
    normal = (~np.isfinite(seen[~lost])).any(0)
    bad = (~np.isfinite(seen[index][lost[index]])).any(0) & ~normal
    part = repeat.micro_batch(index)
    with np.errstate(invalid="ignore"):
        largest = seen[index].max(0)
    found = replace(
        found, direction=FORWARD, place=repeat.places[int(np.flatnonzero(bad)[0])],
        largest=dict(zip(repeat.places, map(float, largest), strict=True)),
        replicas=tuple(map(int, np.flatnonzero(lost[index]))),
    )  # fmt: skip

    def is_bad(rows: Sequence[int]) -> bool:
        return not np.isfinite(repeat.forward(repeat.rows(part, rows), first + index)[:, -1]).all()

    return _with_rows(repeat, found, part, index, first, is_bad)


def _backward(
    repeat: Repeat, found: Finding, part: PyTree, index: int, first: int, gradients: dict[str, np.ndarray]
) -> Finding:
    """Complete the finding of a gradient that is not finite after a finite forward pass."""
    layers = np.zeros(repeat.layers, bool)
    names = []
    for name, finite in gradients.items():
        bad = ~finite
        if bad.shape and repeat.layers:
            layers |= bad
        of = f" (layer {some_of(np.flatnonzero(bad))})" if bad.shape else ""
        names += [f"{name}{of}"] * bool(bad.any())
    place = "the model"
    if repeat.layers:
        last = int(np.flatnonzero(layers)[-1]) if layers.any() else -1
        place = f"layer {last} of {repeat.layers}" if layers.any() else repeat.places[0]
        if last in (-1, repeat.layers - 1) and not _finite(repeat.backward(part, first + index, only_suffix=True)):
            place = "the suffix (what is after the layers)"
    found = replace(found, direction=BACKWARD, place=place, gradients=tuple(names))

    def is_bad(rows: Sequence[int]) -> bool:
        return not _finite(repeat.backward(repeat.rows(part, rows), first + index))

    return _with_rows(repeat, found, part, index, first, is_bad)


def _with_rows(repeat: Repeat, found: Finding, part: PyTree, index: int, first: int, is_bad: Any) -> Finding:
    """Add the rows that fail by themselves."""
    size = repeat.micro * repeat.replicas
    rows = bad_rows(range(size), is_bad)
    replicas = found.replicas or tuple(sorted({row // repeat.micro for row in rows}))
    if not replicas:  # rows that fail together
        parts = np.arange(size).reshape(repeat.replicas, repeat.micro)
        replicas = tuple(bad_rows(range(repeat.replicas), lambda some: is_bad(parts[list(some)].ravel().tolist())))
    return replace(
        found, micro_batch=first + index, rows=tuple(rows), more_rows=len(rows) == MOST < size,
        replicas=replicas, inputs=tuple(repeat.not_finite(part)),
    )  # fmt: skip


def _finite(gradients: dict[str, np.ndarray]) -> bool:
    return all(finite.all() for finite in gradients.values())


MOST = 4  # rows to find; each takes about two runs of a micro-batch for every power of two in its size


def bad_rows(rows: Sequence[int], is_bad: Callable[[Sequence[int]], bool], most: int = MOST) -> list[int]:
    """Find rows that are bad by themselves.

    Args:
      is_bad: whether a micro-batch of these rows, repeated to fill it, is bad.
      most: rows to find before the search ends.

    >>> bad_rows(range(16), lambda some: 3 in some or 12 in some)
    [3, 12]
    """
    found: list[int] = []
    groups = [list(rows)]
    while groups and len(found) < most:
        group = groups.pop()
        if not is_bad(group):
            continue
        if len(group) == 1:
            found += group
            continue
        middle = len(group) // 2
        groups += [group[middle:], group[:middle]]
    return found
