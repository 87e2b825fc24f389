"""Measures the table of docs/models.md, or only the rows that are named: `python docs/models.py olmo2 glm4`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import generated_part

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).with_suffix(".md")
COLUMNS = {
    "logits": "logits", "gradients": "loss, gradients", "export": "export", "generate": "text", "packed": "packed",
}  # fmt: skip


def generated(rows: dict[str, str]) -> Iterator[str]:
    yield f"| model | class | {' | '.join(COLUMNS.values())} |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for name, cells in rows.items():
        yield f"| `{name}` | {cells} |"


def main(names: list[str]) -> None:
    """Measure, and write the page after each row."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/weights")]
    import hugging_face  # belongs to no package

    there = dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    for name in names or hugging_face.CASES:
        made, checks = hugging_face.Pair(name), hugging_face.checks_of(name)
        cells = [f"{getattr(made, check)():.1e}" if check in checks else "" for check in COLUMNS]
        there[name] = f"{made.case.architecture} | {' | '.join(cells)}".replace("0.0e+00", "0")
        generated_part.write(__file__, generated({name: there[name] for name in hugging_face.CASES if name in there}))


if __name__ == "__main__":
    main(sys.argv[1:])
