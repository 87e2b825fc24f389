"""Text of the report: wrapped lines, columns, values, and the layout of the parameters."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import jax

from jzero.layout.sharding import ParamLayout
from jzero.stored_names import numberless

WIDTH = 100


def wrap(text: str, first: str, rest: str) -> list[str]:
    """Break a text into lines; `first` and `rest` indent the first line and the others."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, **options)  # type: ignore[arg-type]


def bullets(lines: Iterable[str]) -> list[str]:
    """Format lines as a list, each wrapped."""
    return [part for line in lines for part in wrap(line, "  - ", "    ")]


def align_columns(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Format rows as columns; the first row holds the titles, and `align` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)] for row in rows]
    lines = ["  " + "  ".join(row).rstrip() for row in cells]
    return [lines[0], "  " + "-" * (max(map(len, lines)) - 2), *lines[1:]]


def value_text(value: Any) -> str:
    """Format a value as in the JSON file: `true`, `5e+08`, `"text"`."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=repr)


MAX_ROWS = 12


def spec_table(step: Any) -> list[str]:
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
    return align_columns(rows, "<>><<")


def _spec(leaf: ParamLayout) -> str:
    return f"P({', '.join(map(repr, leaf.spec))})"


def _note(leaf: ParamLayout, placement: str) -> str:
    kind = "" if leaf.trainable else "state" if leaf.state else "frozen"
    return ", ".join(filter(None, [kind, placement]))


def _elements(leaves: list[ParamLayout]) -> int:
    return sum(prod(leaf.shape) for leaf in leaves)
