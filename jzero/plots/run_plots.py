"""Writes plots of runs: PNG files, and one page that contains them all and refers to nothing else."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from itertools import count
from pathlib import Path

from jzero.display.page import document, html_table, image, styled
from jzero.errors import ConfigError
from jzero.ledger.goodput import LOSSES, duration
from jzero.plots.figures import AXES, GOODPUT, draw_curve, names
from jzero.plots.history import History, read_all

DPI = 150
PAGE = "index.html"
MOST = 100  # restarts of a run in the list
WORDS = "what it is"  # the header of a column of words


class Plots:
    """The plots of one or several runs; a notebook shows them with a table.

    Attributes:
      histories: the curves of each run.
      images: {name: PNG}, drawn when they are first read.
    """

    def __init__(self, histories: Sequence[History], metrics: Sequence[str], x: str, smooth: float):
        known = names(histories)
        if x not in AXES:
            raise ConfigError(f"x = {x!r}: must be {', '.join(AXES)}")
        if not 0 <= smooth < 1:
            raise ConfigError(f"smooth = {smooth!r}: must be from 0 to below 1, such as 0.9")
        if unknown := [name for name in metrics if name not in known]:
            raise ConfigError(f"metric {', '.join(unknown)}: the runs have {', '.join(known)}")
        self.histories = list(histories)
        self._names, self._x, self._smooth = list(metrics) or known, x, smooth

    @cached_property
    def images(self) -> dict[str, bytes]:
        files = {name: io.BytesIO() for name in self._names}
        for name, file in files.items():
            draw_curve(self.histories, name, self._x, self._smooth).savefig(file, format="png", dpi=DPI)
        return {name: file.getvalue() for name, file in files.items()}

    def write(self, out: str | os.PathLike) -> list[Path]:
        """Write a PNG file per plot and the page `index.html` into a directory; return the files."""
        title = ", ".join(history.name for history in self.histories)
        pages = {PAGE: document(title, self._repr_html_()).encode(errors="replace")}
        named = dict(zip(_file_names(self.images), self.images.values(), strict=True))
        directory = Path(out).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        for file, data in (named | pages).items():
            (directory / file).write_bytes(data)
        return [directory / file for file in named | pages]

    def __repr__(self) -> str:
        return f"Plots({', '.join(map(repr, self.histories))}: {', '.join(self._names)})"

    def _repr_html_(self) -> str:
        return styled(*contents(self.histories, self.images))


def read(*runs: str | os.PathLike, metrics: Sequence[str] = (), x: str = "step", smooth: float = 0.0) -> Plots:
    """Read runs and plot them.

    Args:
      runs: checkpoint directories with a ledger, or directories or files of `jsonl_monitor`.
      metrics: the plots to draw; all of them by default.
      x: "step", "samples" or "time" (hours since the run's first start).
      smooth: the weight of the past in the moving average of losses and metrics, from 0 (none) to below 1.

    Raises:
      ConfigError: a run without records, an unknown metric, or no matplotlib.
    """
    return Plots(read_all(runs), metrics, x, smooth)


def _file_names(metrics: Iterable[str]) -> list[str]:
    """Name a file for each metric by its letters, a number where two would have one name.

    >>> _file_names(["loss/a", "loss a", "/"])
    ['loss_a.png', 'loss_a_2.png', 'metric.png']
    """
    found: dict[str, None] = {}
    for metric in metrics:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", metric).strip("_.")[:100] or "metric"
        numbered = (name if number == 1 else f"{name}_{number}" for number in count(1))
        found[next(file for file in (f"{name}.png" for name in numbered) if file not in found)] = None
    return list(found)


def contents(histories: Sequence[History], images: dict[str, bytes]) -> Iterator[str]:
    """Yield the parts of the page."""
    yield f"<h1>{escape(', '.join(history.name for history in histories))}</h1>"
    yield html_table(
        ("run", "steps", "samples", "loss", "speed", "goodput", "wall time", "restarts", "devices"),
        [_row(history) for history in histories],
    )
    yield _plots({name: found for name, found in images.items() if name != GOODPUT})
    if any(history.restarts for history in histories):
        yield "<h2>Restarts</h2><p>A triangle and a dotted line mark where a later start continued.</p><ul>"
        for history in histories:
            for at, reason in history.restarts[:MOST]:
                when = f"after {duration(at.seconds)}" if at.seconds is not None else ""
                yield f"<li>{escape(history.name)}, {when}, from step {at.step}: {escape(reason)}</li>"
            if more := len(history.restarts[MOST:]):
                yield f"<li>{escape(history.name)}, and {more:,} more</li>"
        yield "</ul>"
    if GOODPUT in images:
        yield "<h2>Goodput</h2><p>The share of the wall time since the first start in steps that count. Pauses after a "
        yield "script that ended in order are no part of the wall time.</p>"
        yield _plots({GOODPUT: images[GOODPUT]})
        yield from _losses(histories)


def _plots(images: Mapping[str, bytes]) -> str:
    """Return pictures of one width, and so with letters of one size."""
    return f'<div class="plots">{"".join(image(name, found) for name, found in images.items())}</div>'


def _row(history: History) -> list[str]:
    last, found, about = history.last, history.goodput, history.about
    mesh = " × ".join(f"{axis} {n}" for axis, n in about.get("mesh", {}).items() if n > 1)
    known = {"devices", "device"} <= about.keys()
    devices = f"{about['devices']} {about['device']}" + (f" ({mesh})" if mesh else "") if known else "–"
    return [
        history.name, f"{last.step:,}", f"{last.samples:,}", f"{last.value:.4f}",
        _speed(history.speed),
        f"{100 * found.share:.1f}%" if found else "–", duration(found.wall) if found else "–",
        str(len(history.restarts)) if found else "–", devices,
    ]  # fmt: skip


def _speed(speed: Mapping[str, float]) -> str:
    """Format the speed, in tokens if they are known."""
    if not speed:
        return "–"
    unit, x = list(speed.items())[-1]
    return f"{x:,.4g} {unit}" if x < 100 else f"{x:,.0f} {unit}"


def _losses(histories: Sequence[History]) -> Iterator[str]:
    """Yield the table of what time was lost to, with the words for each line."""
    with_goodput = [(history.name, history.goodput) for history in histories if history.goodput]
    lines = [line for line in LOSSES if any(line in found.lost for _, found in with_goodput)]
    rows = [["steps that count", *(duration(found.steps) for _, found in with_goodput), ""]]
    rows += [
        [line, *(duration(found.lost.get(line, 0.0)) for _, found in with_goodput), LOSSES[line]] for line in lines
    ]
    yield html_table(("", *(name for name, _ in with_goodput), WORDS), rows, "words")
