"""Memory against speed: every configuration that a search compiled, and those that nothing beats in both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jzero.display.figure import GRID, INK, colour, new_figure
from jzero.errors import ConfigError
from jzero.planner.outcomes import Outcome
from jzero.planner.search import Search
from jzero.planner.search_text import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
_GIB = 2**30


def frontier_figure(found: Search) -> Figure:
    """Draw the compiled configurations; the line joins the frontier, and numbers refer to the legend below.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    best, raw = found.frontier, dict(found.raw)
    figure = new_figure(9, 4.5 + 0.22 * len(best))
    axes = figure.add_subplot()
    others = [one for one in found.outcomes if one.step_s and one not in best]
    axes.scatter(*_points(others), color=GRID, edgecolor=INK, linewidth=0.5)
    axes.plot(*_points(best), color=colour(0), marker="o")
    for number, one in enumerate(best, 1):
        (x,), (y,) = _points([one])
        label_ = f"{number}. {label(raw, one.choice)}"
        axes.annotate(str(number), (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9)
        axes.plot([], [], " ", label=label_)
    if best:
        axes.axvline(best[0].usable_bytes / _GIB, color=INK, linewidth=1, linestyle="--")
    axes.set_xlabel("peak memory per GPU, GiB (dashed: what the GPU has)")
    axes.set_ylabel("tokens/s per GPU" if _has_tokens(found) else "samples/s")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, handlelength=0)
    return figure


def write_frontier(found: Search, path: str) -> None:
    """Write the figure.

    Raises:
      ConfigError: matplotlib is not installed, or another ending than those of `FORMATS`.
    """
    check_path(path)
    frontier_figure(found).savefig(path)


def check_path(path: str) -> None:
    """Raise a ConfigError unless the path ends like one of `FORMATS`."""
    if Path(path).suffix not in FORMATS:
        raise ConfigError(f"--frontier {path}: must end in {', '.join(FORMATS)}")


def _has_tokens(found: Search) -> bool:
    return all(one.tokens_per_s_gpu for one in found.outcomes if one.step_s)


def _points(outcomes: list[Outcome] | tuple[Outcome, ...]) -> tuple[list[float], list[float]]:
    """Return the coordinates: GiB, and tokens/s per GPU or samples/s."""
    return [one.peak_bytes / _GIB for one in outcomes], [
        one.tokens_per_s_gpu or one.samples_per_s or 0 for one in outcomes
    ]
