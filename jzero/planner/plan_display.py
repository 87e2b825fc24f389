"""Shows a plan: its sections, tables and lines; as text, and as a page with figures that refers to nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jzero.display.figure import GRID, INK, PALE, colour, new_figure
from jzero.display.page import drawing, html_table, styled
from jzero.display.text_table import quantity, size_text, text_table
from jzero.pipeline.draw import draw_figure, draw_text
from jzero.planner import kernel_costs
from jzero.planner.collectives import KINDS, distinct, loops_text
from jzero.planner.memory import CUDA_ROOM
from jzero.planner.plan_facts import Budget, PlanFacts, PlannedMemory
from jzero.planner.step_time import BETWEEN, COMMUNICATION, COMPUTE, COPIES, EXPOSED, INTERVALS, LOOPS, SLOWED, StepTime
from jzero.planner.traced_operations import MOVE_COLUMNS, MOVE_WORDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = 8  # buffers at the peak
MOST_MOVES = 24
WIDEST = 40  # ticks of a schedule that is drawn
COLLECTIVE_COLUMNS = ["kind", "dtype", "count", "arrays", "bytes", "axes", "group", "loops", "bytes a step"]
AXIS_COLUMNS = ["axes", "devices", "divides of the parameters", "collectives", "bytes a step"]
PARAMETER_COLUMNS = ["name", "shape", "spec"]
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


class PlanSection(NamedTuple):
    """A table with a note below it, or above it if it has no title; the columns `left` contain text."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    left: Sequence[str] = ()
    note: str = ""


def sections(plan: PlanFacts, budget: Budget | None, most: int | None = None) -> dict[str, PlanSection]:
    """Return the sections that have something to show, by name; `most`: of the moves that are listed one by one."""
    collectives, moves, schedule = collective_cells(plan), plan.moves, plan.schedule
    parameters = [[x.name, _cell(x.shape), _cell(x.spec)] for x in jax.tree.leaves(plan.step.layouts)]
    found = {
        "measured": PlanSection(
            "planned and measured", ["", "planned", "measured", "planned / measured"], measured_rows(plan), [""]
        ),
        "memory": memory_section(plan.memory, plan.deepspeed_bytes),
        "live": live_section(plan.memory),
        "collectives": PlanSection(
            "collectives of a step", COLLECTIVE_COLUMNS, collectives, ["kind", "dtype", "axes", "loops"],
            "" if collectives else "no collectives",
        ),
        "axes": PlanSection("by axis", AXIS_COLUMNS, axis_rows(plan), ["axes"]),
        "moves": PlanSection(
            "moved between devices that act as one, from the trace", MOVE_COLUMNS, moves.rows(most),
            MOVE_WORDS,
        ),
        "whole": PlanSection("", note=(moves.whole and f"on whole arrays: {', '.join(moves.whole)}") or ""),
        "pipeline": PlanSection(
            "", note="" if schedule is None else draw_text(schedule) if schedule.ticks <= WIDEST else repr(schedule)
        ),
        "parameters": PlanSection("parameters", PARAMETER_COLUMNS, parameters, PARAMETER_COLUMNS),
        "time": PlanSection(
            "time, estimated", ["part", "time"], time_rows(plan), ["part"],
            "" if plan.time else f"no time estimate: {plan.time_problem}",
        ),
        "budget": PlanSection(
            "the whole run", ["quantity", "amount"], budget_rows(budget) if budget else [], ["quantity"],
        ),
        "warnings": PlanSection("", note="\n".join(f"warning: {line}" for line in plan.warnings)),
    }  # fmt: skip
    return {name: section for name, section in found.items() if section.rows or section.note}


def plan_text(plan: PlanFacts, budget: Budget | None = None) -> str:
    """Return a plan as text, with a budget for the whole run."""
    return "\n\n".join([plan_title(plan), *map(section_text, sections(plan, budget, MOST_MOVES).values())])


def section_text(section: PlanSection, *, plain: bool = False) -> str:
    """Draw one section; `plain` as for `text_table`."""
    if not section.rows:
        return section.note
    drawn = text_table(section.title, section.columns, section.rows, left=section.left, plain=plain)
    parts = [drawn, section.note] if section.title else [section.note, drawn.lstrip()]
    return "\n".join(filter(None, parts))


def plan_title(plan: PlanFacts) -> str:
    step, b = plan.step, plan.step.batch_sizes
    count = sum(prod(layout.shape) for layout in jax.tree.leaves(step.layouts))
    mesh = " x ".join(f"{axis} {n}" for axis, n in step.mesh.shape.items() if n > 1) or "1 device"
    dtype = step.config.optimizer.state_dtype if step.config.optimizer else "fp32"
    moments = f", moments {dtype}" if dtype != "fp32" and not step.setup.optimizer.callers else ""
    tokens = f", {plan.amount.tokens:,} tokens" if plan.amount.tokens else ""
    return (
        f"{quantity(count)} parameters, ZeRO-{step.config.zero_optimization.stage}, "
        f"{step.config.precision_text}{moments}, on {plan.gpus} x {plan.gpu.description} ({mesh})\n"
        f"batch {b.train} = {b.micro} per GPU x {b.accum} accumulation x {step.replicas} replicas{tokens}"
        f"{f'; compiled in {plan.compile_s:.1f} s' if plan.compile_s else ''}"
    )


def measured_rows(plan: PlanFacts) -> list[list[str]]:
    """Return the rows of what was measured and what was planned; none for a plan."""
    if plan.measured is None:
        return []
    seconds, peak, planned = plan.measured.step_s, plan.measured.peak_bytes, plan.memory.peak_bytes
    rows = [["peak memory per GPU", size_text(planned), size_text(peak), f"{planned / peak:.3f}" if peak else "-"]]
    if plan.time and seconds:
        ours = plan.time.step_s
        rows += [["step", f"{1000 * ours:,.1f} ms", f"{1000 * seconds:,.1f} ms", f"{ours / seconds:.3f}"]]
        if tokens := plan.amount.tokens:
            per_gpu = [f"{tokens / s / plan.gpus:,.0f}" for s in (ours, seconds)]
            rows += [["tokens/s per GPU", *per_gpu, f"{seconds / ours:.3f}"]]
    return rows


def memory_section(memory: PlannedMemory, deepspeed: int | None = None) -> PlanSection:
    """Return the memory, part by part; `deepspeed`: bytes by DeepSpeed's formula."""
    rows = [[name, size_text(size), f"{size / memory.peak_bytes:.0%}"] for name, size in memory.parts.items()]
    others = {"peak": memory.peak_bytes, "host memory": memory.host_bytes or None}
    others["model state by DeepSpeed's formula"] = deepspeed
    rows += [[name, size_text(size), ""] for name, size in others.items() if size is not None]
    return PlanSection("memory per GPU", ["part", "bytes", "of the peak"], rows, ["part"], memory.verdict)


def live_section(memory: PlannedMemory) -> PlanSection:
    live = memory.live
    rows = [[size_text(b.bytes), str(b.count), b.shape, b.op_name] for b in live.buffers[:LARGEST]]
    note = f"largest temporary buffers at the peak, in {live.at}; all of them: {size_text(live.peak_bytes)}"
    return PlanSection("", ["bytes", "count", "shape", "operation"], rows, ["shape", "operation"], note)


def collective_cells(plan: PlanFacts) -> list[list[str]]:
    rows = []
    for row, count in distinct(plan.collectives).items():
        axes, total = ", ".join(row.axes or ()) or "-", count * row.times * row.bytes
        cells = [row.kind, row.dtype, count, row.operands, size_text(row.bytes), axes, row.group_size, loops_text(row)]
        rows.append([*map(str, cells), size_text(total)])
    return rows


def axis_rows(plan: PlanFacts) -> list[list[str]]:
    """Return a row for every axis larger than 1, and for every set of axes that collectives run over together.

    It tells how much of the parameters the axes divide, and what is moved over them.
    """
    shape, layouts = plan.step.mesh.shape, jax.tree.leaves(plan.step.layouts)
    every = sum(prod(layout.shape) for layout in layouts)
    alone = [(axis,) for axis, size in shape.items() if size > 1]
    together = {tuple(row.axes or ()) for row in plan.collectives}
    rows = []
    for axes in [*alone, *sorted(together - {*alone, ()})]:
        divided = sum(prod(layout.shape) for layout in layouts if set(axes) <= layout.axes)
        found, devices = plan.collectives.select(axes=axes), prod(shape[axis] for axis in axes)
        share, launches = f"{divided / every:.1%}", str(found.launches)
        rows.append([", ".join(axes), str(devices), share, launches, size_text(found.bytes)])
    return rows


def _cell(values: Iterable[object]) -> str:
    return ", ".join("+".join(v) if isinstance(v, tuple) else "-" if v is None else str(v) for v in values) or "-"


def time_rows(plan: PlanFacts) -> list[list[str]]:
    """Return the rows of the time table; none without an estimate."""
    if (time := plan.time) is None:
        return []
    rows = [["step", f"{1000 * time.step_s:,.1f} ms ± {time.uncertainty:.0%}"]]
    speeds = ("tokens/s", time.tokens_per_s, ",.0f"), ("tokens/s per GPU", time.tokens_per_s_gpu, ",.0f")
    of_all = ("samples/s", time.samples_per_s, ",.1f"), ("MFU", time.mfu, ".1%")
    rows += [[name, format(value, form)] for name, value, form in (*speeds, *of_all) if value]
    rows += [[f"  {name}", f"{1000 * seconds:,.1f} ms"] for name, seconds in time.step.by.items()]
    rows += [[f"  {EXPOSED}", f"{1000 * time.step.exposed_s:,.1f} ms"]]
    return rows + [
        [f"{stream}: {name}", f"{1000 * seconds.sum():,.1f} ms"]
        for (stream, name), seconds in time.step.timeline.items()
        if stream != COMPUTE
    ]


def budget_rows(budget: Budget) -> list[list[str]]:
    rows = [
        ["tokens", quantity(budget.tokens)],
        ["steps", f"{budget.steps:,}"],
        ["days", f"{budget.days:,.1f}"],
        ["GPU-hours", f"{budget.gpu_hours:,.0f}"],
        ["kWh at the cards' power limit", f"{budget.kwh:,.0f}"],
    ]
    return rows + ([] if budget.cost is None else [["cost", f"{budget.cost:,.0f}"]])


# ---------------------------------------------------------------- the page


def plan_html(plan: PlanFacts, budget: Budget | None = None) -> str:
    """Return the contents of the page, for a notebook, with a budget for the whole run.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    heading, batch = plan_title(plan).splitlines()
    found, parts = sections(plan, budget), [f"<h1>{escape(heading)}</h1><p>{escape(batch)}</p>"]
    parts.append(_tiles(plan, budget))
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


def _tiles(plan: PlanFacts, budget: Budget | None) -> str:
    """Return the figures that a reader looks for first."""
    tiles = [("peak memory per GPU", size_text(plan.memory.peak_bytes))]
    if time := plan.time:
        tiles.append((f"a step, ± {time.uncertainty:.0%}", f"{1000 * time.step_s:,.0f} ms"))
        if time.tokens_per_s_gpu:
            tiles.append(("tokens/s per GPU", f"{time.tokens_per_s_gpu:,.0f}"))
        if time.mfu:
            tiles.append(("MFU", f"{time.mfu:.1%}"))
        if budget:
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
