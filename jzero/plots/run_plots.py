"""Draws the curves of runs with matplotlib: PNG files, and one page with them all."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jzero.display.figure import new_figure
from jzero.display.page import document, html_table, image, styled
from jzero.errors import ConfigError, printable, shorten
from jzero.ledger.goodput import LOSSES, duration
from jzero.plots.history import EVAL, LOSS, MEMORY, SPEED, TOKENS, Curve, History, read_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, MUTED, GRID = "#222222", "#666666", "#e2e2e2"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4fa3", "#8c6d31")  # Okabe and Ito's first
STEPS = "#2a9d5c"
LOST = dict(
    zip(
        LOSSES,
        ("#c0392b", "#e74c3c", "#f08a5d", "#bdbdbd", "#8d99ae", "#5c7fa3", "#f2c14e", "#c9a227", "#7b68b5", "#a79bd1",
         "#59b3c2", "#d9c7a3"),
        strict=True,
    )
)  # fmt: skip
AXES = {"step": "step", "samples": "samples", "time": "hours since the first start"}
GOODPUT = "goodput"
COLUMNS = 1080  # of a picture, in pixels: 7.2 inches of 150 dots
_PLAIN = (MEMORY, "lr", "loss_scale", "skipped")  # curves that need no smoothing
_FIRST = (LOSS, "grad_norm", "lr")


def names(histories: Sequence[History]) -> list[str]:
    """List what can be drawn; the curve of `eval_x` goes into the plot of x."""
    found = dict.fromkeys(name for history in histories for name in history.curves)
    with_eval = [name for name in found if not (name.startswith(EVAL) and name.removeprefix(EVAL) in found)]
    last = [name for name in (SPEED, TOKENS, MEMORY) if name in found]
    first = [name for name in _FIRST if name in found]
    middle = sorted(name for name in with_eval if name not in (*first, *last))
    return [*first, *middle, *last, *([GOODPUT] if any(h.goodput for h in histories) else [])]


def draw_curve(histories: Sequence[History], name: str, x: str = "step", smooth: float = 0.0) -> Figure:
    """Draw one of `names` for all runs.

    Args:
      x: "step", "samples" or "time".
      smooth: the weight of the past in an exponential moving average, from 0 (none) to below 1. The values themselves
        stay visible behind it.

    Raises:
      ConfigError: matplotlib is not installed, or the runs have no such curve.
    """
    if name == GOODPUT:
        return _goodput([history for history in histories if history.goodput])
    if x == "time" and (without := [h.name for h in histories if h.last.seconds is None]):
        raise ConfigError(f"x = 'time': {', '.join(without)}: only a ledger has times; choose step or samples")
    figure = new_figure(7.2, 3.8)
    axes = figure.add_subplot()
    for number, history in enumerate(histories):  # a run has its colour in every figure
        if name in history.curves:
            _curve(axes, history, name, x, smooth, RUNS[number % len(RUNS)])
    _dress(axes, name, x)
    if len(histories) > 1 or len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, fontsize=9)
    return figure


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average, corrected for its start; values that are not finite are left out.

    >>> smoothed([1.0, 1.0, float("nan"), 4.0], 0.5)
    [1.0, 1.0, 1.0, 2.714...]
    """
    mean, total, found = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        found.append(mean / total if total else value)
    return found


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a line that looks like the one through these points, from at most four for each column of pixels.

    These are the first one, the lowest, the highest and the last one, so that no spike is lost.

    >>> [part.size for part in thinned(np.arange(10**5), np.arange(10**5))]
    [4320, 4320]
    """
    if x.size <= 4 * COLUMNS:
        return x, y
    y = np.where(np.isfinite(y), y, np.nan)  # drawn as gaps, both
    column = np.floor((x - x.min()) / max(np.ptp(x), 1e-300) * (COLUMNS - 1))
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(first[1:], x.size) - 1
    low, high = (reduce.reduceat(y, first) for reduce in (np.fmin, np.fmax))  # which leave out NaN
    at, values = (x[first], x[first], x[last], x[last]), (y[first], low, high, y[last])
    return np.stack(at, 1).ravel(), np.stack(values, 1).ravel()


def _curve(axes: Axes, history: History, name: str, x: str, smooth: float, colour: str) -> None:
    curve, run, across = history.curves[name], _literal(history.name), axes.get_xaxis_transform()
    at, values = _x(curve, x), _y(curve)
    if (gaps := at[~np.isfinite(values)]).size:
        axes.plot(
            *thinned(gaps, np.full(gaps.size, 0.03)), transform=across, marker="x", markersize=6, color=colour,
            linestyle="", label=f"{run}, not finite",
        )  # fmt: skip
    if smooth and name not in _PLAIN:
        axes.plot(*thinned(at, values), color=colour, linewidth=0.8, alpha=0.25, label=f"_{run}, not smoothed")
        values = np.array(smoothed(values.tolist(), smooth))
    axes.plot(*thinned(at, values), color=colour, linewidth=1.6, label=run, marker="o" if len(values) == 1 else "")
    if evals := history.curves.get(f"{EVAL}{name}"):
        axes.plot(
            *thinned(_x(evals, x), _y(evals)), color=colour, linewidth=1.2, linestyle="--", marker="o",
            markersize=3.5, label=f"{run}, evaluation",
        )  # fmt: skip
    if history.restarts:
        columns = map(np.array, zip(*(restart.at for restart in history.restarts), strict=True))
        places, heights = thinned(_x(Curve(*columns), x), np.ones(len(history.restarts)))
        axes.vlines(places, 0, 1, transform=across, color=colour, linewidth=0.9, linestyle=":", alpha=0.8)
        axes.plot(
            places, heights, transform=across, clip_on=False, marker="v", markersize=5, color=colour, linestyle="",
            label="_restart",
        )  # fmt: skip


def _literal(text: str) -> str:
    """Escape what matplotlib does not draw: controls, a formula between two `$`, labels that begin with `_`."""
    return (" " if text.startswith("_") else "") + shorten(printable(text), 100).replace("$", r"\$")


def _x(curve: Curve, x: str) -> np.ndarray:
    """Return the column of a curve for the horizontal axis."""
    if x == "time" and curve.seconds is not None:
        return curve.seconds / 3600
    return curve.samples if x == "samples" else curve.step


def _y(curve: Curve) -> np.ndarray:
    return np.where(np.abs(curve.value) < 1e100, curve.value, np.inf)  # matplotlib cannot divide an axis up to 1e308


def _dress(axes: Axes, title: str, x: str) -> None:
    axes.set_title(_literal(title), loc="left", fontsize=11, color=INK)
    axes.set_xlabel(AXES[x], fontsize=9, color=MUTED)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(labelsize=9, colors=MUTED, length=0)
    if x != "time":
        axes.locator_params(axis="x", integer=True)
    if title in (SPEED, TOKENS, MEMORY):
        axes.set_ylim(bottom=0)


def _goodput(histories: Sequence[History]) -> Figure:
    """Draw one bar per run: the steps that count from the left, then what the other time went to."""
    every = [history.goodput for history in histories if history.goodput]
    present = [line for line in LOSSES if any(one.lost.get(line, 0.0) > 2e-3 * one.wall for one in every)]
    rows = -(-(len(present) + 1) // 4)
    figure = new_figure(7.2, 1.0 + 0.45 * len(histories) + 0.25 * rows)
    axes = figure.add_subplot()
    for row, history in enumerate(histories):
        if not (found := history.goodput) or not found.wall:
            continue
        left = 0.0
        for line, colour in {"steps": STEPS, **{line: LOST[line] for line in present}}.items():
            width = 100 * (found.steps if line == "steps" else found.lost.get(line, 0.0)) / found.wall
            axes.barh(row, width, left=left, height=0.62, color=colour, label=line if row == 0 else f"_{line}")
            if width >= 6:
                axes.text(left + width / 2, row, f"{width:.0f}%", ha="center", va="center", fontsize=8.5, color="white")
            left += width
    labels = [_literal(f"{h.name}\n{duration(h.goodput.wall)}" if h.goodput else h.name) for h in histories]
    _dress(axes, GOODPUT, "step")
    axes.grid(visible=False)
    axes.set_yticks(range(len(histories)), labels, fontsize=9, color=INK)
    axes.set_xlim(0, 100)
    axes.set_ylim(len(histories) - 0.5, -0.5)
    axes.set_xlabel("% of the wall time", fontsize=9, color=MUTED)
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    return figure


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
