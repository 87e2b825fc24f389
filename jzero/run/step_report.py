"""The sections of the run report that only a step shows: its trace tells them, once the shapes of a batch are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax

from jzero.errors import escaped, some_of
from jzero.mesh import GROUP_AXES, group_size, present
from jzero.model import STACK
from jzero.planner.advice import gathered_sequences
from jzero.planner.traced_collectives import COLUMNS, across_hosts, moves, whole_sequences
from jzero.planner.traced_matmuls import matmuls
from jzero.run.report_text import align_columns, bullets
from jzero.stored_names import numberless

MOST_MOVES = 12
Sections = Iterable[tuple[str, Sequence[str]]]


def step_report(step: Any) -> str:
    """Return these sections as text; empty if there is nothing to say."""
    return joined(sections_of_step(step))


def sections_of_step(step: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, lines) of each section; without lines before the first step."""
    yield f"Moved over {' x '.join(present(step.mesh, *GROUP_AXES))} in a step, per device", _moves(step)
    yield "fp8", bullets(_fp8(step))
    yield "Half precision", bullets(_half_precision(step))


def joined(sections: Sections) -> str:
    """Return the sections that have lines as text."""
    return escaped("\n\n".join("\n".join([title, *lines]) for title, lines in sections if lines))


def _moves(step: Any) -> list[str]:
    """Tabulate what the devices of a group moved in the first step that ran, and list what ran on whole arrays."""
    if group_size(step.mesh) == 1 or step.traced is None:
        return []
    found = moves(step.traced, step.mesh)
    lines = align_columns([COLUMNS, *found.rows(MOST_MOVES)], "<<>>><<<") if found.all else []
    whole = [f"ran on whole arrays: {some_of(found.whole, 6)}"] if found.whole else []
    undivided = whole_sequences(step.model, step.setup.weights, step.traced, step.mesh)
    gathered = gathered_sequences(found, step.mesh, step.setup.config.context_parallel.attention)
    return lines + bullets([*whole, *undivided, *gathered, *across_hosts(found, step.mesh)])


def _half_precision(step: Any) -> list[str]:
    """List what is not in half precision in the first step that ran, and which arrays of its batch were cast."""
    if step.precision.compute.itemsize > 2 or step.traced is None:
        return []
    found, lines = matmuls(step.traced), []
    name = step.config.precision
    if found.cast:
        arrays = ", ".join(array or "the batch" for array in found.cast)
        lines.append(f"cast to {step.precision.compute} ({name}.auto_cast): {arrays}")
    if found.float32:
        where = [f"{count} in {line}, {share:.0%}" for line, (count, share) in found.float32_by_line.items()]
        lines.append(
            f"{found.float32} of {found.count} matmuls ({found.float32_share:.0%} of the FLOPs) run in float32 "
            f"under {name}, since an operand is float32: {some_of(where, 6)}. If you did not intend this, cast the "
            "operand to the dtype of the weights"
        )
    return lines


def _fp8(step: Any) -> list[str]:
    """List the weights that the first step multiplied in fp8, and why the other large ones of the stack were not."""
    choice = step.setup.fp8.choice
    if choice is None:
        return []
    shapes = {leaf.name: leaf.shape for leaf in jax.tree.leaves(step.layouts)}

    def listed(names: Iterable[str]) -> str:
        return some_of(sorted({numberless(name).removeprefix(f"{STACK}/") for name in names}), 6)

    stack = sum(prod(shape) for name, shape in shapes.items() if name.startswith(f"{STACK}/"))
    share = sum(prod(shapes[name]) for name in choice.names) / stack
    section, frozen = step.config.fp8, choice.names - step.setup.histories.keys()
    delayed = section.recipe == "delayed"
    scales = f"delayed scales, by {section.amax_history_len} steps" if delayed else "current scales"
    lines = [
        f"{len(choice.names)} weights of each layer, {share:.1%} of the stack's elements, are multiplied in fp8 "
        f"(format {section.format}, {scales}): {listed(choice.names)}"
    ]
    if delayed and frozen:
        lines.append(f"frozen weights use current scales: {listed(frozen)}")
    reasons: dict[str, list[str]] = {}
    for name, why in choice.others.items():
        reasons.setdefault(why, []).append(name)
    return lines + [f"kept in {step.precision.compute}: {listed(names)}, {why}" for why, names in reasons.items()]
