"""The parts of pages that refer to nothing else: style, tables, pictures. All text is escaped."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK_GROUND = "#1a1a1a"  # of pages for readers who prefer a dark one, see `dark`
STYLE = """
.jzero { font: 15px/1.5 system-ui, sans-serif; color: #222; background: white; }
.jzero { max-width: 1180px; margin: 0 auto; padding: 8px 20px; }
.jzero h1 { font-size: 22px; } .jzero h2 { font-size: 17px; margin: 26px 0 6px; }
.jzero table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
.jzero th, .jzero td { text-align: right; padding: 4px 12px; border-bottom: 1px solid #e2e2e2; }
.jzero td:not(:first-child) { white-space: nowrap; }
.jzero th { color: #666; font-weight: 600; } .jzero th:first-child, .jzero td:first-child { text-align: left; }
.jzero .words :is(th, td):last-child { text-align: left; white-space: normal; color: #444; }
.jzero .plots { margin-top: 22px; display: grid; }
.jzero .plots { grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 14px; }
.jzero figure { margin: 0; overflow-x: auto; } .jzero svg { width: 100%; min-width: 640px; }
.jzero .tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0; }
.jzero .tiles div { border: 1px solid #e2e2e2; border-radius: 6px; padding: 8px 18px; }
.jzero .tiles b { display: block; font-size: 22px; } .jzero .tiles span { color: #666; font-size: 13px; }
.jzero img { width: 100%; height: auto; background: white; } .jzero p, .jzero li { color: #444; }
"""


def dark(selector: str) -> str:
    """Return the CSS that turns light to dark, and keeps hues, for readers who prefer it; of all pages and pictures.

    One rule for what is drawn and written, as a white ground, is enough: nobody chooses colours twice. White becomes
    `DARK_GROUND`, and black a light grey, so that the contrast stays.
    """
    return f"@media (prefers-color-scheme: dark) {{ {selector} {{ filter: invert(0.9) hue-rotate(180deg); }} }}"


def document(title: str, body: str) -> str:
    """Return a whole page."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>:root {{ color-scheme: light dark; }} body {{ background: light-dark(white, {DARK_GROUND}); }}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def styled(*parts: str) -> str:
    """Join the parts of a page, or of a notebook's cell, under jzero's style."""
    return "\n".join([f'<style>{STYLE}{dark(".jzero")}</style><div class="jzero">', *parts, "</div>"])


def drawing(name: str, figure: Figure) -> str:
    """Return a figure as SVG inside the page; `name` describes it to those who do not see it."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", stream.getvalue()[stream.getvalue().index("<svg") :], count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return f'<figure role="img" aria-label="{escape(name, quote=True)}">{svg}</figure>'


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """Format a table of numbers, or with the kind "words" one whose last column has words."""
    head = "".join(_cell(cell, "th") for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table class={kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str, tag: str = "td") -> str:
    return f"<{tag}>{escape(text)}</{tag}>"


def image(name: str, png: bytes) -> str:
    """Return a PNG as part of a page; `name` describes it to those who do not see it."""
    data = base64.b64encode(png).decode()
    return f'<figure><img alt="{escape(name, quote=True)}" src="data:image/png;base64,{data}"></figure>'
