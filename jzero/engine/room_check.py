"""Compares the compiled step with its devices; if it does not fit, names what is largest and what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

from jzero.data import DataLoader
from jzero.display.table import table
from jzero.errors import OutOfMemoryError
from jzero.planner.memory import memory
from jzero.planner.nearest import nearest, nearest_text
from jzero.planner.plan_text import LIVE_COLUMNS, live_rows, memory_table
from jzero.planner.planned_memory import PlannedMemory, planned_memory
from jzero.planner.room import Room, room_here
from jzero.train_step import TrainStep
from jzero.tree import PyTree
from jzero.update import Conditions
from jzero.values.sizes import size_text

EXHAUSTED = "RESOURCE_EXHAUSTED"  # the status of XLA's error when memory runs out


def check_room(step: TrainStep) -> None:
    """Compare the peak of the step that is about to run with its device; devices without a limit are not checked.

    Raises:
      OutOfMemoryError: the peak is larger. All processes compile the same, and so raise the same.
    """
    there = room_here()
    if there is not None and step.traced is not None and not (need := _planned(step, there)).fits:
        raise OutOfMemoryError(explained(step, need, f"the step {need.verdict} per device", there.most))


def check_data(step: TrainStep, loader: DataLoader, cut: Callable[[PyTree], PyTree], only: Conditions) -> None:
    """Compile the step for the training data before it begins, and check its room, as `check_room` does.

    Data without a length is not read ahead: its first step is checked.

    Args:
      cut: cuts a batch to the length of the first step.
      only: the conditions of the first step.
    """
    if room_here() is None or (part := loader.first()) is None:
        return
    try:
        step.expect([cut(part)] * step.batch_sizes.accum, only)
    except OutOfMemoryError:
        raise
    except Exception:  # the script may change these batches, or give the loss more; its first step tells
        step.first.forget()


@contextlib.contextmanager
def out_of_memory(step: TrainStep) -> Iterator[None]:
    """Explain XLA's error if memory runs out in a step, as an OutOfMemoryError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        there = room_here()
        if EXHAUSTED not in str(error) or there is None or step.traced is None or step.has_varied:
            raise  # of several programs nothing tells which it was
        need = _planned(step, there)
        own, most = size_text(need.peak_bytes), size_text(there.most)
        what = (
            f"a step ran out of memory: it needs {own} per device, and other arrays and gaps the rest of XLA's {most}"
        )
        # Of several processes maybe only this one is here, while the others wait in a collective: it compiles nothing.
        less = min(there.most, need.peak_bytes - 1) if jax.process_count() == 1 else None
        raise OutOfMemoryError(explained(step, need, what, less)) from error


def explained(step: TrainStep, need: PlannedMemory, what: str, most: int | None) -> str:
    """Return what a step needs, part by part, and the nearest configurations that fit into `most` bytes, if given."""
    lines = [what, memory_table(need), f"largest temporary buffers, in {need.live.at}:"]
    lines.append(table("", LIVE_COLUMNS, live_rows(need), left=["shape", "operation"], plain=True).lstrip())
    if most is not None:
        found = nearest(step, step.first.batch_shapes, need.peak_bytes, most)
        lines.append(nearest_text(found, step, need.live))
    return "\n".join(lines)


def _planned(step: TrainStep, there: Room) -> PlannedMemory:
    compiled: jax.stages.Compiled = step.traced.lower().compile()  # type: ignore[union-attr]  # shared with the call
    return planned_memory(step, memory(compiled, step), compiled.as_text() or "", there)
