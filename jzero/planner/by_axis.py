"""A plan by axis of the mesh: how much of the parameters each divides, and what is moved over it."""

from __future__ import annotations

from math import prod

import jax

from jzero.planner.plan_facts import PlanFacts
from jzero.values.sizes import size_text

COLUMNS = ["axes", "devices", "divides of the parameters", "collectives", "bytes a step"]


def axis_rows(plan: PlanFacts) -> list[list[str]]:
    """Return a row for every axis larger than 1, and for every set of axes that collectives run over together."""
    shape, layouts = plan.step.mesh.shape, jax.tree.leaves(plan.step.layouts)
    every = sum(prod(layout.shape) for layout in layouts)
    alone = [(axis,) for axis, size in shape.items() if size > 1]
    together = {tuple(row.axes or ()) for row in plan.collectives}
    rows = []
    for axes in [*alone, *sorted(together - {*alone, ()})]:
        divided = sum(prod(layout.shape) for layout in layouts if set(axes) <= layout.axes)
        found = plan.collectives.select(axes=axes)
        devices = prod(shape[axis] for axis in axes)
        rows.append(
            [", ".join(axes), str(devices), f"{divided / every:.1%}", str(found.launches), size_text(found.bytes)]
        )
    return rows
