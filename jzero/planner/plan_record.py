"""A plan as JSON values. docs/plan.md documents the keys; a change of their meaning raises `SCHEMA`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from math import prod
from typing import Any

import jax

from jzero.planner.collectives import Collectives
from jzero.planner.plan_facts import PlanFacts

SCHEMA = 1
MOST_BUFFERS = 20


def plan_record(plan: PlanFacts, tokens: float | None = None, price: float | None = None) -> dict[str, Any]:
    """Return a plan as JSON values; `tokens` and `price` as for `Plan.record`."""
    budget = plan.time.budget(tokens, price) if tokens is not None and plan.time else None
    return {
        "schema": SCHEMA,
        "versions": {name: version(name) for name in ("jzero", "jax", "jaxlib")},
        "gpu": _gpu(plan),
        "layout": _layout(plan),
        "memory": _memory(plan),
        "collectives": list(collective_rows(plan.collectives)),
        "moves": [asdict(move) for move in plan.moves.all],
        "whole_arrays": list(plan.moves.whole),
        "time": _time(plan),
        "time_problem": plan.time_problem or None,
        "budget": asdict(budget) if budget else None,
        "pipeline": _pipeline(plan),
        "parameters": list(parameter_rows(plan)),
        "warnings": list(plan.warnings),
        "compile_s": round(plan.compile_s, 2),
    }


def _gpu(plan: PlanFacts) -> dict[str, Any]:
    gpu = plan.gpu
    return {
        "description": gpu.description, "count": plan.gpus, "nodes": plan.nodes, "gpus_per_node": plan.gpus_per_node,
        "memory_bytes": gpu.memory, "tflops": gpu.tflops[0], "watts": gpu.watts, "source": gpu.source,
    }  # fmt: skip


def _layout(plan: PlanFacts) -> dict[str, Any]:
    step, sizes = plan.step, plan.step.batch_sizes
    return {
        "model": repr(step.model), "parameters": sum(prod(row["shape"]) for row in parameter_rows(plan)),
        "stage": step.config.zero_optimization.stage, "precision": step.config.precision, "mesh": dict(step.mesh.shape),
        "batch": {"global": sizes.train, "micro": sizes.micro, "accumulation": sizes.accum, "replicas": step.replicas},
        "tokens": plan.amount.tokens,
    }  # fmt: skip


def _memory(plan: PlanFacts) -> dict[str, Any]:
    memory, there = plan.memory, plan.memory.room
    return {
        "peak_bytes": memory.peak_bytes, "parts": dict(memory.parts), "host_bytes": memory.host_bytes,
        "preallocated_bytes": there.preallocated, "usable_bytes": there.most, "fits": memory.fits,
        "verdict": memory.verdict, "deepspeed_bytes": plan.deepspeed_bytes, "temps_bytes": memory.xla.temps,
        "live_bytes": memory.live.peak_bytes, "live_at": memory.live.at,
        "live": [asdict(buffer) for buffer in memory.live.buffers[:MOST_BUFFERS]],
    }  # fmt: skip


def _time(plan: PlanFacts) -> dict[str, Any] | None:
    if plan.time is None:
        return None
    time, step = plan.time, plan.time.step
    return {
        "step_s": time.step_s, "uncertainty": time.uncertainty, "rates": time.origin,
        "samples_per_s": time.samples_per_s,
        "tokens_per_s": time.tokens_per_s, "tokens_per_s_gpu": time.tokens_per_s_gpu, "mfu": time.mfu,
        "useful_flops": time.useful_flops, "compute_s": step.compute_s, "exposed_s": step.exposed_s,
        "by": dict(step.by), "exposed": dict(step.exposed),
    }  # fmt: skip


def _pipeline(plan: PlanFacts) -> dict[str, Any] | None:
    schedule = plan.schedule
    if schedule is None:
        return None
    names = ("name", "stages", "micro_batches", "chunks", "ticks")
    return {name: getattr(schedule, name) for name in names} | {"bubble": schedule.bubble()}


def collective_rows(found: Collectives) -> Iterator[dict[str, Any]]:
    """Yield the collectives; those that differ only in the operation they come from are one with a count."""
    for row, count in Counter(replace(row, op_name="") for row in found).items():
        values = asdict(row)
        del values["op_name"]
        yield {"count": count, "times": row.times} | values


def parameter_rows(plan: PlanFacts) -> Iterator[dict[str, Any]]:
    """Yield the parameters with their specs."""
    for layout in jax.tree.leaves(plan.step.layouts):
        spec = [list(axes) if isinstance(axes, tuple) else axes for axes in layout.spec]
        yield {"name": layout.name, "shape": list(layout.shape), "spec": spec, "trainable": layout.trainable}
