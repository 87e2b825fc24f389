"""Lines of reports and plans about parameters that `tensor` leaves whole because it divides no fitting dimension."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any

import jax

from jzero.errors import some_of
from jzero.mesh import TENSOR
from jzero.planner.state_bytes import leaf_bytes
from jzero.stored_names import numberless
from jzero.values.sizes import size_text


def undivided(step: Any) -> Iterator[str]:
    """Name these parameters, what they cost each device beside divided ones, and the size that would fit.

    Layers that are alike share a line. The bytes are those of masters, moments, weights and gradients inside the step.
    """
    if not step.setup.unfit:
        return
    degree, price = step.mesh.shape[TENSOR], leaf_bytes(step)
    layouts = {layout.name: layout for layout in jax.tree.leaves(step.layouts)}
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, dim in step.setup.unfit.items():
        layout = layouts[name]
        alike[numberless(name), layout.shape[layout.stacked :], dim, layout.divided].append(name)
    for (_, shape, dim, divided), names in alike.items():
        others = {axis: step.mesh.shape[axis] for axis, at in divided if at == dim or dim is None}
        parts = degree * prod(others.values())
        beside = "".join(f", beside mesh.{axis} = {n}," for axis, n in others.items())
        what = "any dimension" if dim is None else f"the {shape[dim]}"
        more = sum(sum(price[name]) for name in names) * (1 - 1 / degree)
        fits = "" if dim is None else f"; {-(-shape[dim] // parts) * parts} would fit"
        yield (
            f"whole along {TENSOR}, mesh.{TENSOR} = {degree}{beside} does not divide {what} of {some_of(names, 4)} "
            f"{list(shape)}: {size_text(more)} more per device than divided{fits}"
        )
