"""The part of a page that a script beside it generates: everything below a mark that names the script."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write(script: str, lines: Iterable[str]) -> None:
    """Rewrite the page of a script, `recipes.md` for `recipes.py`, with these lines below the mark."""
    page = Path(script).with_suffix(".md")
    page.write_text(replaced(script, page.read_text(encoding="utf-8"), lines), encoding="utf-8")


def replaced(script: str, text: str, lines: Iterable[str]) -> str:
    """Return the page's text with everything below the mark replaced.

    Raises:
      ValueError: the text has no mark.
    """
    mark = f"<!-- Everything below is written by docs/{Path(script).name} -->\n"
    by_hand, found, _ = text.partition(mark)
    if not found:
        raise ValueError(f"{Path(script).with_suffix('.md')} lacks the line {mark!r}")
    return by_hand + mark + "\n" + "\n".join(lines) + "\n"
