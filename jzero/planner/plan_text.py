"""A plan as text: tables for a terminal or a log file."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from jzero.display.table import quantity, table
from jzero.pipeline.draw import draw_text
from jzero.planner import by_axis, moves
from jzero.planner.plan_facts import PlanFacts
from jzero.planner.plan_record import collective_rows, parameter_rows
from jzero.planner.plan_time import Budget
from jzero.planner.planned_memory import PlannedMemory
from jzero.values.sizes import size_text

LARGEST = 8  # buffers at the peak
LIVE_COLUMNS = ["bytes", "count", "shape", "operation"]
MOST_MOVES = 24
MOVES_TITLE = "moved between devices that act as one, from the trace"
WIDEST = 40  # ticks of a schedule that is drawn
COLLECTIVE_COLUMNS = ["kind", "dtype", "count", "arrays", "bytes", "axes", "group", "loops", "bytes a step"]
MEASURED_COLUMNS = ["", "planned", "measured", "planned / measured"]
PARAMETER_COLUMNS = ["name", "shape", "spec"]


def plan_text(plan: PlanFacts, tokens: float | None = None, price: float | None = None) -> str:
    """Return a plan as text; `tokens` and `price` as for `Plan.record`."""
    memory = f"{memory_table(plan.memory, plan.deepspeed_bytes)}\n{plan.memory.verdict}"
    parts = [title(plan), memory, _live(plan), _collectives(plan), *_by_axis(plan), *_pipeline(plan)]
    parts += [_parameters(plan), _time(plan)]
    if tokens is not None and plan.time:
        parts.append(budget_text(plan.time.budget(tokens, price)))
    parts += ["\n".join(f"warning: {line}" for line in plan.warnings)] if plan.warnings else []
    return "\n\n".join(parts)


def measured_rows(plan: PlanFacts) -> list[list[str]]:
    """Return the rows of what was measured beside what was planned; none for a plan."""
    if plan.measured is None:
        return []
    seconds, peak = plan.measured.step_s, plan.measured.peak_bytes
    planned = plan.memory.peak_bytes
    rows = [["peak memory per GPU", size_text(planned), size_text(peak), _ratio(planned, peak)]]
    if plan.time and seconds:
        ours = plan.time.step_s
        rows += [["step", f"{1000 * ours:,.1f} ms", f"{1000 * seconds:,.1f} ms", _ratio(ours, seconds)]]
        if tokens := plan.amount.tokens:
            per_gpu = [f"{tokens / s / plan.gpus:,.0f}" for s in (ours, seconds)]
            rows += [["tokens/s per GPU", *per_gpu, _ratio(seconds, ours)]]
    return rows


def _ratio(planned: float, measured: float) -> str:
    return f"{planned / measured:.3f}" if measured else "-"


def title(plan: PlanFacts) -> str:
    """Return the lines about what is planned."""
    step, b = plan.step, plan.step.batch_sizes
    count = sum(prod(row["shape"]) for row in parameter_rows(plan))
    mesh = " x ".join(f"{axis} {n}" for axis, n in step.mesh.shape.items() if n > 1) or "1 device"
    dtype = step.config.optimizer.state_dtype if step.config.optimizer else "fp32"
    moments = f", moments {dtype}" if dtype != "fp32" and not step.setup.callers_optimizer else ""
    tokens = f", {plan.amount.tokens:,} tokens" if plan.amount.tokens else ""
    return (
        f"{quantity(count)} parameters, ZeRO-{step.config.zero_optimization.stage}, "
        f"{step.config.precision_text}{moments}, on {plan.gpus} x {plan.gpu.description} ({mesh})\n"
        f"batch {b.train} = {b.micro} per GPU x {b.accum} accumulation x {step.replicas} replicas{tokens}"
        f"{f'; compiled in {plan.compile_s:.1f} s' if plan.compile_s else ''}"
    )


def memory_rows(memory: PlannedMemory, deepspeed: int | None = None) -> list[list[str]]:
    """Return the rows of the memory table; `deepspeed`: bytes by DeepSpeed's formula."""
    rows = [[name, size_text(size), f"{size / memory.peak_bytes:.0%}"] for name, size in memory.parts.items()]
    rows += [["peak", size_text(memory.peak_bytes), ""]]
    if memory.host_bytes:
        rows += [["host memory", size_text(memory.host_bytes), ""]]
    if deepspeed is not None:
        rows += [["model state by DeepSpeed's formula", size_text(deepspeed), ""]]
    return rows


def memory_table(memory: PlannedMemory, deepspeed: int | None = None) -> str:
    """Return the memory, part by part; `deepspeed` as for `memory_rows`."""
    return table("memory per GPU", ["part", "bytes", "of the peak"], memory_rows(memory, deepspeed), left=["part"])


def live_rows(memory: PlannedMemory) -> list[list[str]]:
    """Return the rows of the largest buffers at the peak."""
    shown = memory.live.buffers[:LARGEST]
    return [[size_text(b.bytes), str(b.count), b.shape, b.op_name] for b in shown]


def live_title(plan: PlanFacts) -> str:
    """Return what the table of buffers shows."""
    live = plan.memory.live
    return f"largest temporary buffers at the peak, in {live.at}; all of them: {size_text(live.peak_bytes)}"


def _live(plan: PlanFacts) -> str:
    drawn = table("", LIVE_COLUMNS, live_rows(plan.memory), left=["shape", "operation"])
    return f"{live_title(plan)}\n{drawn.lstrip()}"


def collective_cells(plan: PlanFacts) -> list[list[str]]:
    """Return the rows of the table of collectives."""
    rows = []
    for row in collective_rows(plan.collectives):
        axes = ", ".join(row["axes"] or ()) or "-"
        loops = " x ".join("?" if n is None else str(n) for n in row["loops"]) or "-"
        total = row["count"] * row["times"] * row["bytes"]
        cells = [row["kind"], row["dtype"], row["count"], row["operands"], size_text(row["bytes"]), axes]
        rows.append([str(cell) for cell in cells] + [str(row["group_size"]), loops, size_text(total)])
    return rows


def _collectives(plan: PlanFacts) -> str:
    cells = collective_cells(plan)
    left = ["kind", "dtype", "axes", "loops"]
    return table("collectives of a step", COLLECTIVE_COLUMNS, cells, left=left) if cells else "no collectives"


def _by_axis(plan: PlanFacts) -> Iterator[str]:
    if rows := by_axis.axis_rows(plan):
        yield table("by axis", by_axis.COLUMNS, rows, left=["axes"])
    if plan.moves.all:
        yield table(MOVES_TITLE, moves.COLUMNS, plan.moves.rows(MOST_MOVES), left=moves.WORDS)
    if plan.moves.whole:
        yield f"on whole arrays: {', '.join(plan.moves.whole)}"


def _pipeline(plan: PlanFacts) -> Iterator[str]:
    if schedule := plan.schedule:
        yield draw_text(schedule) if schedule.ticks <= WIDEST else repr(schedule)


def parameter_cells(plan: PlanFacts) -> list[list[str]]:
    """Return the rows of the table of parameters."""
    return [[row["name"], *map(_cell, (row["shape"], row["spec"]))] for row in parameter_rows(plan)]


def _parameters(plan: PlanFacts) -> str:
    return table("parameters", PARAMETER_COLUMNS, parameter_cells(plan), left=PARAMETER_COLUMNS)


def _cell(values: list[Any]) -> str:
    return ", ".join("+".join(v) if isinstance(v, list) else "-" if v is None else str(v) for v in values) or "-"


def time_rows(plan: PlanFacts) -> list[list[str]]:
    """Return the rows of the time table; none without an estimate."""
    if plan.time is None:
        return []
    time = plan.time
    rows = [["step", f"{1000 * time.step_s:,.1f} ms ± {time.uncertainty:.0%}"]]
    if time.tokens_per_s:
        rows += [
            ["tokens/s", f"{time.tokens_per_s:,.0f}"],
            ["tokens/s per GPU", f"{time.tokens_per_s_gpu:,.0f}"],
        ]
    rows += [["samples/s", f"{time.samples_per_s:,.1f}"]] + ([["MFU", f"{time.mfu:.1%}"]] if time.mfu else [])
    rows += [[f"  {name}", f"{1000 * seconds:,.1f} ms"] for name, seconds in time.step.by.items()]
    rows += [["  exposed communication", f"{1000 * time.step.exposed_s:,.1f} ms"]]
    return rows


def _time(plan: PlanFacts) -> str:
    if plan.time is None:
        return f"no time estimate: {plan.time_problem}"
    return table("time, estimated", ["part", "time"], time_rows(plan), left=["part"])


def budget_rows(budget: Budget) -> list[list[str]]:
    """Return the rows of what a number of tokens takes."""
    rows = [
        ["tokens", quantity(budget.tokens)],
        ["steps", f"{budget.steps:,}"],
        ["days", f"{budget.days:,.1f}"],
        ["GPU-hours", f"{budget.gpu_hours:,.0f}"],
        ["kWh at the cards' power limit", f"{budget.kwh:,.0f}"],
    ]
    return rows + ([] if budget.cost is None else [["cost", f"{budget.cost:,.0f}"]])


def budget_text(budget: Budget) -> str:
    """Return what a number of tokens takes."""
    return table("the whole run", ["quantity", "amount"], budget_rows(budget), left=["quantity"])
