"""A plan as one page that refers to nothing else: figures as SVG, tables, and every assumption."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from jzero.display.page import document, drawing, styled, table
from jzero.pipeline.draw import draw_figure
from jzero.planner import by_axis, moves, plan_text
from jzero.planner.plan_facts import PlanFacts
from jzero.planner.plan_figures import memory_figure, timeline_figure
from jzero.planner.room import CUDA_ROOM
from jzero.values.sizes import size_text


def write_page(plan: PlanFacts, path: str | os.PathLike, tokens: float | None, price: float | None) -> None:
    """Write the page; `tokens` and `price` as for `Plan.record`.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    heading = plan_text.title(plan).splitlines()[0]
    text = document(heading, styled(*_parts(plan, tokens, price)))
    Path(path).expanduser().write_text(text, encoding="utf-8")


def _parts(plan: PlanFacts, tokens: float | None, price: float | None) -> Iterator[str]:
    heading, batch = plan_text.title(plan).splitlines()
    yield f"<h1>{escape(heading)}</h1><p>{escape(batch)}</p>"
    yield _tiles(plan, tokens, price)
    if plan.measured:
        yield f"<h2>Planned and measured</h2>{table(plan_text.MEASURED_COLUMNS, plan_text.measured_rows(plan))}"
    yield f"<h2>Memory per GPU</h2><p>{escape(plan.memory.verdict)}</p>"
    yield drawing("memory per GPU, part by part", memory_figure(plan.memory))
    yield table(("part", "bytes", "of the peak"), plan_text.memory_rows(plan.memory, plan.deepspeed_bytes))
    yield f"<h2>At the peak</h2><p>{escape(plan_text.live_title(plan))}</p>"
    yield table(plan_text.LIVE_COLUMNS, plan_text.live_rows(plan.memory), "words")
    if plan.time:
        yield "<h2>Time of a step</h2>"
        yield drawing("one step on one GPU: compute and communication", timeline_figure(plan.time.step))
        yield table(("part", "time"), plan_text.time_rows(plan))
        if tokens is not None:
            yield "<h2>The whole run</h2>"
            yield table(("quantity", "amount"), plan_text.budget_rows(plan.time.budget(tokens, price)))
    if plan.warnings:
        yield f"<h2>Warnings</h2>{_list(plan.warnings)}"
    yield "<h2>Collectives of a step</h2>"
    yield table(plan_text.COLLECTIVE_COLUMNS, plan_text.collective_cells(plan))
    yield from _by_axis(plan)
    if schedule := plan.schedule:
        yield "<h2>Pipeline</h2>"
        drawn = schedule.ticks <= plan_text.WIDEST
        yield drawing("pipeline schedule", draw_figure(schedule)) if drawn else f"<p>{escape(repr(schedule))}</p>"
    yield f"<h2>Parameters</h2>{table(plan_text.PARAMETER_COLUMNS, plan_text.parameter_cells(plan), 'words')}"
    yield f"<h2>Method</h2>{_list(_method(plan))}"


def _by_axis(plan: PlanFacts) -> Iterator[str]:
    if rows := by_axis.axis_rows(plan):
        yield f"<h2>By axis</h2>{table(by_axis.COLUMNS, rows)}"
    if plan.moves.all:
        title = plan_text.MOVES_TITLE.capitalize()
        yield f"<h2>{title}</h2>{table(moves.COLUMNS, plan.moves.rows(), 'words')}"
    if plan.moves.whole:
        yield f"<p>On whole arrays: {escape(', '.join(plan.moves.whole))}</p>"


def _tiles(plan: PlanFacts, tokens: float | None, price: float | None) -> str:
    """Return the figures that a reader looks for first."""
    tiles = [("peak memory per GPU", size_text(plan.memory.peak_bytes))]
    if time := plan.time:
        tiles.append((f"a step, ± {time.uncertainty:.0%}", f"{1000 * time.step_s:,.0f} ms"))
        if time.tokens_per_s_gpu:
            tiles.append(("tokens/s per GPU", f"{time.tokens_per_s_gpu:,.0f}"))
        if time.mfu:
            tiles.append(("MFU", f"{time.mfu:.1%}"))
        if tokens is not None:
            budget = time.budget(tokens, price)
            tiles += [("days", f"{budget.days:,.1f}"), ("GPU-hours", f"{budget.gpu_hours:,.0f}")]
            tiles += [] if budget.cost is None else [("cost", f"{budget.cost:,.0f}")]
    cells = (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _method(plan: PlanFacts) -> list[str]:
    there = plan.memory.room
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
            f"network or cooling. MFU: forward and backward products over the data sheet's {plan.gpu.tflops[0]:,.0f} "
            "TFLOP/s."
        )
    return lines
