"""Writes the table of docs/faults.md from tests/faults/table.py: `python docs/faults.py`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generated_part

FAULTS = Path(__file__).parent.parent / "tests/faults"


def generated() -> Iterator[str]:
    for area, faults in table().items():
        yield f"## {area}\n"
        yield "| fault | what jzero does | within, or test |"
        yield "|---|---|---|"
        for fault in faults:
            last = "1 s" if fault.provoke else f"`{fault.test}`"
            yield f"| {_cell(fault.fault)} | {_cell(fault.outcome)} | {last} |"
        yield ""


def table() -> dict[str, list[Any]]:
    """Import the table, which belongs to no package."""
    sys.path.insert(0, str(FAULTS))
    return importlib.import_module("table").TABLE


def _cell(text: str) -> str:
    """Escape a text for Markdown; in a code span only `|` needs it."""
    text = re.sub(r"`[^`]*`|\*", lambda found: r"\*" if found[0] == "*" else found[0], text)
    return text.replace("|", r"\|")


if __name__ == "__main__":
    generated_part.write(__file__, generated())
