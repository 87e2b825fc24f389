"""Draws a plan as one page that refers to nothing else: figures as SVG, tables, and every assumption."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jzero.display.figure import GRID, INK, PALE, colour, new_figure
from jzero.display.page import document, drawing, html_table, styled
from jzero.display.text_table import size_text
from jzero.pipeline.draw import draw_figure
from jzero.planner import kernel_costs
from jzero.planner.collectives import KINDS
from jzero.planner.memory import CUDA_ROOM
from jzero.planner.plan_facts import PlanFacts, PlannedMemory, budget_of
from jzero.planner.plan_text import WIDEST, PlanSection, plan_title, sections
from jzero.planner.step_time import (
    BETWEEN,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    EXPOSED,
    INTERVALS,
    LOOPS,
    SLOWED,
    StepTime,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# The sections in the page's order, with their headings.
_HEADINGS = {
    "measured": "Planned and measured", "memory": "Memory per GPU", "live": "At the peak", "time": "Time of a step",
    "budget": "The whole run", "warnings": "Warnings", "collectives": "Collectives of a step", "axes": "By axis",
    "moves": "Moved between devices that act as one, from the trace", "whole": "On whole arrays",
    "pipeline": "Pipeline", "parameters": "Parameters",
}  # fmt: skip
_WORDS = ("live", "moves", "parameters")  # whose last column is text
SHOWN = 0.004  # of the peak: smaller parts have no entry in the legend
COLUMNS = 4  # entries in a line of the legend of a step's chart
_CATEGORIES = {
    kernel_costs.PRODUCTS: "#1f5fbf", kernel_costs.ATTENTION: "#d9730d", kernel_costs.ELEMENTWISE: "#23804a",
    kernel_costs.REDUCTIONS: "#c9a227", kernel_costs.TRANSPOSES: "#11808a", kernel_costs.COPIES: "#5b6470",
    kernel_costs.HOST: "#8c564b",
    SLOWED: "#a9b8d6", LOOPS: "#9aa0a8", BETWEEN: "#c2c6cc", EXPOSED: "#eab8c4",
    **dict(zip(KINDS, ("#8a4fbf", "#b8336a", "#e0709f", "#5b7fe0", "#4b2e83", "#2fa3b0", "#b59a5f"), strict=True)),
}  # fmt: skip


def write_page(plan: PlanFacts, path: str | os.PathLike, tokens: float | None, price: float | None) -> None:
    """Write the page; `tokens` and `price` as for `Plan.record`.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    text = document(plan_title(plan).splitlines()[0], plan_html(plan, tokens, price))
    Path(path).expanduser().write_text(text, encoding="utf-8")


def plan_html(plan: PlanFacts, tokens: float | None = None, price: float | None = None) -> str:
    """Return the contents of the page, for a notebook; arguments and errors as for `write_page`."""
    heading, batch = plan_title(plan).splitlines()
    found, parts = sections(plan, tokens, price), [f"<h1>{escape(heading)}</h1><p>{escape(batch)}</p>"]
    parts.append(_tiles(plan, tokens, price))
    for name, heading in _HEADINGS.items():
        if section := found.get(name):
            parts += [f"<h2>{heading}</h2>", *_contents(plan, name, section)]
    return styled(*parts, f"<h2>Method</h2>{_list(_method(plan))}")


def _contents(plan: PlanFacts, name: str, section: PlanSection) -> Iterator[str]:
    schedule = plan.schedule
    if name == "pipeline" and schedule and schedule.ticks <= WIDEST:
        yield drawing("pipeline schedule", draw_figure(schedule))
    elif name == "warnings":
        yield _list(plan.warnings)
    elif section.note:
        yield f"<p>{escape(section.note)}</p>"
    if name == "memory":
        yield drawing("memory per GPU, part by part", memory_figure(plan.memory))
    if name == "time" and plan.time:
        yield drawing("one step on one GPU: compute and communication", timeline_figure(plan.time.step))
    if section.rows:
        yield html_table(section.columns, section.rows, "words" if name in _WORDS else "")


def _tiles(plan: PlanFacts, tokens: float | None, price: float | None) -> str:
    """Return the figures that a reader looks for first."""
    tiles = [("peak memory per GPU", size_text(plan.memory.peak_bytes))]
    if time := plan.time:
        tiles.append((f"a step, ± {time.uncertainty:.0%}", f"{1000 * time.step_s:,.0f} ms"))
        if time.tokens_per_s_gpu:
            tiles.append(("tokens/s per GPU", f"{time.tokens_per_s_gpu:,.0f}"))
        if time.mfu:
            tiles.append(("MFU", f"{time.mfu:.1%}"))
        if budget := budget_of(plan, tokens, price):
            tiles += [("days", f"{budget.days:,.1f}"), ("GPU-hours", f"{budget.gpu_hours:,.0f}")]
            tiles += [] if budget.cost is None else [("cost", f"{budget.cost:,.0f}")]
    cells = (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _method(plan: PlanFacts) -> list[str]:
    there = plan.memory.usable
    lines = [
        f"The step was compiled for {plan.gpus} x {plan.gpu.description} ({plan.nodes} nodes of {plan.gpus_per_node}) "
        f"{'on them' if plan.measured else 'with no GPU in the machine'}. Device properties: {plan.gpu.source}.",
        "The peak is XLA's. Masters, optimizer state and the batch are its arguments; compute parameters and gradients "
        "follow from the layout; activations and temporaries are the rest of XLA's block.",
    ]
    if not plan.measured:
        lines.append(
            f"Of the GPU's {size_text(there.device)}, {size_text(there.nccl)} for NCCL's buffers and "
            f"{size_text(CUDA_ROOM)} for CUDA and its libraries are assumed; XLA preallocates "
            f"{size_text(there.preallocated)}."
        )
    if plan.time:
        lines.append(
            f"Rates: {plan.time.origin}. Energy: the card's power limit, {plan.gpu.watts} W, all the time; no hosts, "
            f"network or cooling. MFU: forward and backward matmuls over the data sheet's {plan.gpu.tflops[0]:,.0f} "
            "TFLOP/s."
        )
    return lines


def memory_figure(memory: PlannedMemory) -> Figure:
    """Draw the parts of the peak side by side, above the GPU's memory and what of it XLA may have.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    figure, there, gib = new_figure(11, 2.3), memory.usable, 2**30
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
    if there.most < there.device:  # of a device that is there, XLA reports its own part alone
        axes.text(there.most / gib, -0.47, "besides NCCL and CUDA ", ha="right", va="center", fontsize=8, color=INK)
    axes.set_yticks([0, 1], ["the GPU", "the step"])
    axes.tick_params(length=0)
    axes.set_xlabel("GiB")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    return figure


def timeline_figure(step: StepTime) -> Figure:
    """Draw one step: the share of each moment that a category takes, stacked; compute and its waits fill their row.

    The area of a category is its time.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    spent = {key: float(seconds.sum()) for key, seconds in step.timeline.items()}
    streams = [stream for stream in (COPIES, COMMUNICATION, COMPUTE) if any(key[0] == stream for key in spent)]
    lines = -(-len(spent) // COLUMNS)
    figure = new_figure(11, 0.7 + 0.9 * len(streams) + 0.19 * lines)
    axes = figure.add_subplot(xlim=(0, 1000 * step.step_s), ylim=(-0.5, len(streams) - 0.5))
    edges, each = np.linspace(0, 1000 * step.step_s, INTERVALS + 1), step.step_s / INTERVALS
    tops = {stream: np.full(INTERVALS + 1, row - 0.4) for row, stream in enumerate(streams)}
    for key in sorted(spent, key=lambda key: (-streams.index(key[0]), key[1] == EXPOSED)):
        (stream, label), below = key, tops[key[0]]
        tops[stream] = below + 0.8 / each * np.append(step.timeline[key], step.timeline[key][-1])
        axes.fill_between(
            edges, below, tops[stream], step="post", linewidth=0,
            color=_CATEGORIES.get(label, GRID), label=f"{label}: {1000 * spent[key]:,.1f} ms", gid=f"{stream}: {label}",
        )  # fmt: skip
    axes.set_yticks(range(len(streams)), streams)
    axes.tick_params(length=0)
    axes.set_xlabel("ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=COLUMNS, frameon=False, fontsize=9)
    return figure
