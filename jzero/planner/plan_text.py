"""The sections of a plan, tables and lines that its text and its page show; and the text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import jax

from jzero.display.text_table import quantity, size_text, text_table
from jzero.pipeline.draw import draw_text
from jzero.planner import traced_collectives
from jzero.planner.collectives import distinct, loops_text
from jzero.planner.plan_facts import Budget, PlanFacts, PlannedMemory, budget_of
from jzero.planner.step_time import COMPUTE, EXPOSED

LARGEST = 8  # buffers at the peak
MOST_MOVES = 24
WIDEST = 40  # ticks of a schedule that is drawn
COLLECTIVE_COLUMNS = ["kind", "dtype", "count", "arrays", "bytes", "axes", "group", "loops", "bytes a step"]
AXIS_COLUMNS = ["axes", "devices", "divides of the parameters", "collectives", "bytes a step"]
PARAMETER_COLUMNS = ["name", "shape", "spec"]


class PlanSection(NamedTuple):
    """A table, of which the columns `left` have text, with a note: below it, or above a table without a title."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    left: Sequence[str] = ()
    note: str = ""


def sections(
    plan: PlanFacts, tokens: float | None, price: float | None, most: int | None = None
) -> dict[str, PlanSection]:
    """Return the sections that have something to show, by name.

    Args:
      tokens, price: as for `Plan.record`.
      most: of the moves that are listed one by one.
    """
    collectives, moves, budget = collective_cells(plan), plan.moves, budget_of(plan, tokens, price)
    schedule = plan.schedule
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
            "moved between devices that act as one, from the trace", traced_collectives.COLUMNS, moves.rows(most),
            traced_collectives.WORDS,
        ),
        "whole": PlanSection("", note=(moves.whole and f"on whole arrays: {', '.join(moves.whole)}") or ""),
        "pipeline": PlanSection(
            "", note="" if schedule is None else draw_text(schedule) if schedule.ticks <= WIDEST else repr(schedule)
        ),
        "parameters": PlanSection("parameters", PARAMETER_COLUMNS, parameter_cells(plan), PARAMETER_COLUMNS),
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


def plan_text(plan: PlanFacts, tokens: float | None = None, price: float | None = None) -> str:
    """Return a plan as text; `tokens` and `price` as for `Plan.record`."""
    return "\n\n".join([plan_title(plan), *map(section_text, sections(plan, tokens, price, MOST_MOVES).values())])


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
    rows += [["peak", size_text(memory.peak_bytes), ""]]
    if memory.host_bytes:
        rows += [["host memory", size_text(memory.host_bytes), ""]]
    if deepspeed is not None:
        rows += [["model state by DeepSpeed's formula", size_text(deepspeed), ""]]
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


def parameter_cells(plan: PlanFacts) -> list[list[str]]:
    return [[layout.name, *map(_cell, (layout.shape, layout.spec))] for layout in jax.tree.leaves(plan.step.layouts)]


def _cell(values: Iterable[object]) -> str:
    return ", ".join("+".join(v) if isinstance(v, tuple) else "-" if v is None else str(v) for v in values) or "-"


def time_rows(plan: PlanFacts) -> list[list[str]]:
    """Return the rows of the time table; none without an estimate."""
    if (time := plan.time) is None:
        return []
    rows = [["step", f"{1000 * time.step_s:,.1f} ms ± {time.uncertainty:.0%}"]]
    if time.tokens_per_s:
        rows += [["tokens/s", f"{time.tokens_per_s:,.0f}"], ["tokens/s per GPU", f"{time.tokens_per_s_gpu:,.0f}"]]
    rows += [["samples/s", f"{time.samples_per_s:,.1f}"]] + ([["MFU", f"{time.mfu:.1%}"]] if time.mfu else [])
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
