"""Draws the pictures of the README and of the pages: `python docs/pictures.py` writes docs/images/*.svg."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from jzero.display.page import dark
from jzero.pipeline.draw import draw_figure
from jzero.pipeline.schedules import make_schedule

IMAGES = Path(__file__).with_name("images")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # name: chunks per stage
SHARDS = ("#1f5fbf", "#23804a", "#d9730d", "#8a4fbf")
INK, PALE, WHITE = "#333333", "#e8eaee", "#ffffff"

# Equal input gives an equal file, so that a redrawn picture shows up in git only if it has changed.
matplotlib.rcParams.update({"svg.hashsalt": "jzero", "svg.fonttype": "none", "font.family": "sans-serif"})


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, chunks in SCHEDULES.items():
        save(draw_figure(make_schedule(name, stages=4, micro_batches=8, chunks=chunks)), name)
    save(mesh(), "mesh")
    save(zero(), "zero")


def save(figure: Figure, name: str) -> None:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue().replace("</style>", f"{dark(':root')}</style>", 1)
    (IMAGES / f"{name}.svg").write_text(text, encoding="utf-8")


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A white picture with one unit per 1/10 inch and no axes."""
    figure = Figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, edge: str = "none") -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.6", facecolor=colour, edgecolor=edge)
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="<->", mutation_scale=9, color=INK, linewidth=1))


def mesh() -> Figure:
    """Sixteen devices as pipe 2 x data 2 x zero 4: who holds which part, and what moves along each axis."""
    figure, axes = canvas(84, 37)
    for pipe in range(2):
        for data in range(2):
            left, top = 12 + 37 * data, 5 + 15 * pipe
            box(axes, left, top, 34, 10.5, PALE)
            axes.text(left + 1, top + 1.7, f"ZeRO group: pipe {pipe}, data {data}", fontsize=8, color=INK, va="center")
            for zero in range(4):
                x = left + 1 + 8.1 * zero
                box(axes, x, top + 3.2, 7.6, 6.4, SHARDS[zero])
                layers = "layers 0-7" if pipe == 0 else "layers 8-15"
                axes.text(x + 3.8, top + 5.3, layers, fontsize=7, color=WHITE, ha="center", va="center")
                axes.text(x + 3.8, top + 7.6, f"shard {zero} of 4", fontsize=7, color=WHITE, ha="center", va="center")
    arrow(axes, (13, 33), (45, 33))
    axes.text(29, 35, "zero: all-gather, reduce-scatter", fontsize=8.5, color=INK, ha="center", va="center")
    arrow(axes, (28, 2.5), (67, 2.5))
    axes.text(47.5, 1.2, "data: all-reduce", fontsize=8.5, color=INK, ha="center", va="center")
    arrow(axes, (9.5, 9), (9.5, 27))
    axes.text(8.6, 18, "pipe: send\nactivations", fontsize=8.5, color=INK, ha="right", va="center")
    axes.text(65, 34, "the batch lies on (data, zero)", fontsize=8.5, color=INK, ha="center", va="center")
    return figure


def zero() -> Figure:
    """What each of four devices holds at stages 0 to 3, in bytes per parameter (bf16 compute, Adam)."""
    figure, axes = canvas(84, 34)
    parts = (("compute parameters", 2, "#1f5fbf", 3), ("gradients", 2, "#23804a", 2), ("fp32 state", 12, "#d9730d", 1))
    scale = 1.05
    for stage in range(4):
        top = 3 + 7 * stage
        axes.text(1, top + 2.7, f"stage {stage}", fontsize=9, color=INK, va="center")
        for device in range(4):
            x = 9 + 18.6 * device
            if stage == 0:
                axes.text(x + 8.4, 1.6, f"device {device}", fontsize=8, color=INK, ha="center", va="center")
            for _, size, colour, partitioned_from in parts:
                width, held = size * scale, size * scale / (4 if stage >= partitioned_from else 1)
                box(axes, x, top, width, 5.4, PALE)
                offset = device * held if stage >= partitioned_from else 0
                axes.add_patch(matplotlib.patches.Rectangle((x + offset, top), held, 5.4, color=colour, linewidth=0))
                x += width + 0.15
    x = 1.0
    for name, size, colour, _ in parts:
        axes.add_patch(matplotlib.patches.Rectangle((x, 31.3), 1.5, 1.5, color=colour, linewidth=0))
        axes.text(x + 2.2, 32.1, f"{name}, {size} bytes per parameter", fontsize=8, color=INK, va="center")
        x += 28
    return figure


if __name__ == "__main__":
    main()
