"""Tables of text, with lines and bold titles on a terminal, wrapped lines, and values in readable units."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence

from jzero.errors import escaped


def text_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str], *, plain: bool = False
) -> str:
    """Draw a table; the columns `left` are aligned to the left, numbers to the right. `plain`: also on a terminal.

    >>> print(text_table("two", ["name", "FLOPs"], [["fc1", "1.2 G"], ["  bias", "3 k"]], left=["name"]))
    two
    name    FLOPs
    fc1     1.2 G
      bias    3 k
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty() and not plain
    drawn = Table(
        title=escaped(title), title_justify="left", box=box.SIMPLE_HEAD if terminal else None, pad_edge=False,
        title_style="bold" if terminal else "", header_style="bold" if terminal else "",
    )  # fmt: skip
    for name in columns:
        drawn.add_column(name, justify="left" if name in left else "right", no_wrap=True, min_width=len(name))
    for row in rows:
        drawn.add_row(*map(escaped, row))
    # Wide enough for any row: a table in a log file must be complete.
    console = Console(
        width=max(240, len(title)), force_terminal=terminal, color_system="auto" if terminal else None,
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def quantity(x: float, unit: str = "") -> str:
    """Format a number with three digits, the prefix of its unit, and the unit.

    >>> [quantity(0), quantity(512, "FLOP"), quantity(1.23456e9), quantity(98_765.0, "FLOP"), quantity(123_456)]
    ['0', '512 FLOP', '1.23 G', '98.8 kFLOP', '123 k']
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= 0.9995 * factor:
            return f"{float(f'{x / factor:.3g}'):g} {prefix}{unit}"
    return f"{x:.3g} {unit}".rstrip()


def size_text(n_bytes: float) -> str:
    """Format bytes in the unit that leaves one to three digits before the point: `1.54 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while n_bytes >= 1000 and len(units) > 1:
        n_bytes /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or n_bytes >= 100 else 1 if n_bytes >= 10 else 2
    return f"{n_bytes:.{digits}f} {units[0]}"


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


def value_text(value: object) -> str:
    """Format a value as in the JSON file: `true`, `5e+08`, `"text"`."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=repr)
