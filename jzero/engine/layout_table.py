"""The layout of the parameters as a table: in groups for the run report, one by one for the dump."""

from __future__ import annotations

from math import prod
from typing import Any

import jax

from jzero.engine.text import table
from jzero.planner.state_bytes import bytes_per_device
from jzero.stored_names import numberless
from jzero.zero import ParamLayout

MAX_ROWS = 12


def grouped(step: Any) -> list[str]:
    """Tabulate the parameters' specs; leaves with a common name prefix share a row."""
    leaves = sorted(jax.tree.leaves(step.layouts), key=lambda leaf: leaf.name)

    def groups_of(depth: int) -> dict[tuple[str, ...], list[ParamLayout]]:
        groups: dict[tuple[str, ...], list[ParamLayout]] = {}
        for leaf in leaves:
            note = _note(leaf, "replicated" if leaf.why else "")
            groups.setdefault((*numberless(leaf.name).split("/")[:-1][:depth], _spec(leaf), note), []).append(leaf)
        return groups

    groups = next((g for depth in (2, 1) if len(g := groups_of(depth)) <= MAX_ROWS), groups_of(0))
    rows = [["parameters", "leaves", "elements", "spec", ""]]
    for (*begin, spec, note), members in groups.items():
        names = {numberless(leaf.name) for leaf in members}
        name = names.pop() if len(names) == 1 else "/".join([*begin, "*"])
        rows.append([name, f"{len(members)}", f"{_elements(members):,}", spec, note])
    total = _elements(leaves)
    rows.append(["total", f"{len(leaves)}", f"{total:,}", "", ""])
    if any("frozen" in row[-1] for row in rows):
        trained = [leaf for leaf in leaves if leaf.trainable]
        rows.append(["trained", f"{len(trained)}", f"{_elements(trained):,}", "", f"{_elements(trained) / total:.2%}"])
    return table(rows, "<>><<")


def one_by_one(step: Any) -> list[str]:
    """Tabulate every parameter as it is between two steps; the bytes are those of one device."""
    leaves, params = jax.tree.leaves(step.layouts), step.state_shapes.params
    rows = [["parameter", "shape", "spec", "dtype", "bytes", "elements", ""]]
    for leaf, x in zip(leaves, jax.tree.leaves(params), strict=True):
        n_bytes = bytes_per_device(x, leaf.spec, step.mesh)
        note = _note(leaf, leaf.why)
        rows.append([leaf.name, str([*x.shape]), _spec(leaf), str(x.dtype), f"{n_bytes:,}", f"{x.size:,}", note])
    total = bytes_per_device(params, step.state_specs.params, step.mesh)
    rows.append(["total", "", "", "", f"{total:,}", f"{_elements(leaves):,}", ""])
    return table(rows, "<<<<>><")


def _spec(leaf: ParamLayout) -> str:
    return f"P({', '.join(map(repr, leaf.spec))})"


def _note(leaf: ParamLayout, placement: str) -> str:
    kind = "" if leaf.trainable else "state" if leaf.state else "frozen"
    return ", ".join(filter(None, [kind, placement]))


def _elements(leaves: list[ParamLayout]) -> int:
    return sum(prod(leaf.shape) for leaf in leaves)
