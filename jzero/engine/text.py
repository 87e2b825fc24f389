"""Text of the report and the dump: wrapped lines, columns, values and sizes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from jzero.values.sizes import size_text

__all__ = ["bullets", "size_text", "table", "value_text", "wrap"]

WIDTH = 100


def wrap(text: str, first: str, rest: str) -> list[str]:
    """Break a text into lines; `first` and `rest` indent the first line and the others."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, **options)  # type: ignore[arg-type]


def bullets(lines: Iterable[str]) -> list[str]:
    """Format lines as a list, each wrapped."""
    return [part for line in lines for part in wrap(line, "  - ", "    ")]


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Format rows as columns; the first row holds the titles, and `align` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)] for row in rows]
    lines = ["  " + "  ".join(row).rstrip() for row in cells]
    return [lines[0], "  " + "-" * (max(map(len, lines)) - 2), *lines[1:]]


def value_text(value: Any) -> str:
    """Format a value as in the JSON file: `true`, `5e+08`, `"text"`."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=repr)
