"""The figures of a plan's page: memory as a bar beside what the GPU has, and the timeline of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jzero.display.figure import GRID, INK, PALE, SHARDS, colour, new_figure
from jzero.planner.planned_memory import PlannedMemory
from jzero.planner.timeline import COMMUNICATION, COMPUTE
from jzero.values.sizes import size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jzero.planner.step_time import StepTime

SHOWN = 0.004  # of the peak: smaller parts have no entry in the legend


def memory_figure(memory: PlannedMemory) -> Figure:
    """Draw the parts of the peak side by side, above the GPU's memory and what of it XLA may have.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    figure, there, gib = new_figure(11, 2.3), memory.room, 2**30
    axes = figure.add_subplot(ylim=(-0.55, 1.5), xlim=(0, 1.01 * max(there.device, memory.peak_bytes) / gib))
    left = 0.0
    for i, (name, size) in enumerate(memory.parts.items()):
        shown = size > SHOWN * memory.peak_bytes
        label = f"{name}: {size_text(size)}" if shown else None
        axes.barh(1, size / gib, left=left, height=0.62, color=colour(i), label=label)
        left += size / gib
    axes.barh(0, there.device / gib, height=0.62, color=PALE)
    axes.barh(0, there.preallocated / gib, height=0.62, color=GRID)
    axes.text(
        there.preallocated / gib / 2, 0, f"XLA preallocates {size_text(there.preallocated)}", ha="center", va="center"
    )
    axes.axvline(there.most / gib, color=INK, linewidth=1, linestyle="--")
    if there.most < there.device:  # of a device that is there, XLA tells its own part alone
        axes.text(there.most / gib, -0.47, "beside NCCL and CUDA ", ha="right", va="center", fontsize=8, color=INK)
    axes.set_yticks([0, 1], ["the GPU", "the step"])
    axes.tick_params(length=0)
    axes.set_xlabel("GiB")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def timeline_figure(step: StepTime) -> Figure:
    """Draw one step: what computes, what communicates, and where compute waits.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    figure, streams = new_figure(11, 2.2), (COMMUNICATION, COMPUTE)
    axes = figure.add_subplot(xlim=(0, 1000 * step.step_s), ylim=(-0.5, 1.5))
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for stream, label, start, end in step.timeline:
        spans.setdefault((label, stream), []).append((1000 * start, 1000 * (end - start)))
    longest = sorted(spans, key=lambda key: -sum(length for _, length in spans[key]))
    colours = {key: colour(i) if i < len(SHARDS) else GRID for i, key in enumerate(longest)}
    for (label, stream), pieces in spans.items():
        row, fill = streams.index(stream), colours[label, stream]
        axes.broken_barh(pieces, (row - 0.33, 0.66), facecolors=fill, edgecolors=fill, linewidth=0.3)
    axes.set_yticks(range(len(streams)), streams)
    axes.tick_params(length=0)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(handles=_legend(longest, colours), loc="outside upper left", ncols=5, frameon=False, fontsize=9)
    return figure


def _legend(longest: list[tuple[str, str]], colours: dict[tuple[str, str], str]) -> list[Any]:
    from matplotlib.patches import Patch

    entries = [Patch(color=colours[key], label=key[0]) for key in longest[: len(SHARDS)]]
    return entries + ([Patch(color=GRID, label="others")] if len(longest) > len(SHARDS) else [])
