"""The model state by module, per device: a table of `memory_breakdown`."""

from __future__ import annotations

from typing import Any

from jzero.display.table import table
from jzero.engine.text import size_text
from jzero.model import ENDS, STACK
from jzero.planner.state_bytes import LeafBytes, leaf_bytes
from jzero.stored_names import numberless

OTHER = "other optimizer state"


def by_module(step: Any) -> str:
    """Tabulate the bytes of each module of a `TrainStep`'s model; layers with equal names but for numbers are one."""
    found: dict[tuple[str, ...], LeafBytes] = {(): LeafBytes()}
    for name, size in leaf_bytes(step).items():
        path = _path(numberless(name).split("/")) if name else (OTHER,)
        for depth in range(len(path) + 1):
            found[path[:depth]] = _sum(found.get(path[:depth], LeafBytes()), size)
    tree = sorted(found, key=lambda path: (path[:1] == (OTHER,), path))
    rows = [(path, found[path]) for path in tree if any(found[path])]
    host = found[()].host > 0
    columns = ["module", "masters", "optimizer", "parameters", "gradients", "total", *["host"] * host]
    return table("model state by module, per device", columns, [_cells(*row, host) for row in rows], left=["module"])


def _path(name: list[str]) -> tuple[str, ...]:
    """Return the module of a parameter; a parameter of the model itself, as "ends/embed", has a row of its own."""
    alone = name[0] in (ENDS, STACK) and len(name) == 2
    return tuple(name if alone else name[:-1])


def _sum(a: LeafBytes, b: LeafBytes) -> LeafBytes:
    return LeafBytes(*map(sum, zip(a, b, strict=True)))


def _cells(path: tuple[str, ...], size: LeafBytes, host: bool) -> list[str]:
    *device, on_host = size
    name = "  " * len(path) + path[-1] if path else "the model"
    return [name, *map(size_text, (*device, sum(device))), *[size_text(on_host)] * host]
