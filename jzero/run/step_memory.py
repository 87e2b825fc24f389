"""The memory of a step: its lines and table for `memory_breakdown`, and whether it fits its devices.

If it does not fit, the error names what is largest and what to change.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from pathlib import Path
from typing import Any

import jax

from jzero.data import DataLoader
from jzero.data.curriculum import Curriculum
from jzero.display.slow_work import compiling, slow_work
from jzero.display.text_table import size_text, text_table
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import run_on_all
from jzero.distributed.machine import fullest_first
from jzero.errors import OutOfMemoryError, with_type
from jzero.model import ENDS, STACK
from jzero.planner.memory import UsableMemory, memory, usable_memory_here
from jzero.planner.nearest import nearest, nearest_text
from jzero.planner.plan_display import live_section, memory_section, section_text
from jzero.planner.plan_facts import PlannedMemory, planned_memory
from jzero.planner.state_bytes import LeafBytes, leaf_bytes
from jzero.step.train_step import TrainStep
from jzero.step.update import SkipWhen
from jzero.stored_names import numberless
from jzero.tree import PyTree

STATUS = Path("/proc/self/status")  # Linux


def used(when: str) -> str:
    """Describe the memory in use now on the fullest device of this process, and on the host.

    The peaks are those since the process began: JAX cannot reset them. CPU devices count nothing: their arrays are part
    of the host's memory.
    """
    counted, host = fullest_first(), _host()
    if not counted:
        kind = jax.local_devices()[0].platform
        return f"memory {when}: {host} ({kind} devices report none of their own)"
    device, found = counted[0]
    limit = f" of {size_text(found['bytes_limit'])}" if found.get("bytes_limit") else ""
    of = f", the fullest of {len(counted)}" if len(counted) > 1 else ""
    now, peak = size_text(found["bytes_in_use"]), size_text(found["peak_bytes_in_use"])
    return f"memory {when}: {now} in use, peak {peak}{limit} on device {device.id}{of}; {host}"


def planned(step: Any, curriculum: Curriculum | None = None) -> str:
    """Describe the memory that a `TrainStep` that ran needs on one device, by its compiler's plan.

    Under a curriculum these are the steps with the longest sequences, which need the most; their program is
    compiled here.
    """
    which = ""
    if curriculum:
        which = " like the first" if curriculum.post_process else f" of sequence {curriculum.longest}"
    try:
        traced = step.first.traced(curriculum.uncut) if curriculum else step.traced
        need = memory(traced.lower().compile(), step)  # without a curriculum JAX finds the compiled program in a cache
    except Exception as error:  # of the model or the compiler: a line of the report must not end the run
        return f"memory of a step{which}, not planned: {with_type(error)}"
    parts = {"arguments": need.arguments, "outputs": need.outputs - need.aliased, "temporaries": need.temps}
    listed = " + ".join(f"{name} {size_text(n_bytes)}" for name, n_bytes in parts.items())
    host = f", and {size_text(need.host)} of the host" if need.host else ""
    return f"memory of a step{which}, planned: {size_text(need.peak)} per device = {listed}{host}"


def _host() -> str:
    if not STATUS.exists():
        return "host memory unknown on this system"
    fields = dict(row.split(":", 1) for row in STATUS.read_text().splitlines())
    now, peak = (size_text(1024 * int(fields[name].split()[0])) for name in ("VmRSS", "VmHWM"))
    return f"host {now}, peak {peak}"


OTHER = "other optimizer state"


def by_module(step: Any) -> str:
    """Tabulate the bytes of each module of a `TrainStep`'s model; layers with equal names but for numbers are one."""
    found: dict[tuple[str, ...], LeafBytes] = {(): LeafBytes()}
    for name, size in leaf_bytes(step).items():
        path = _path(numberless(name).split("/")) if name else (OTHER,)
        for depth in range(len(path) + 1):
            found[path[:depth]] = LeafBytes(*map(add, found.get(path[:depth], LeafBytes()), size))
    tree = sorted(found, key=lambda path: (path[:1] == (OTHER,), path))
    host = found[()].host > 0
    columns = ["module", "masters", "optimizer", "parameters", "gradients", "total", *["host"] * host]
    cells = [_cells(path, found[path], host) for path in tree if any(found[path])]
    return text_table("model state by module, per device", columns, cells, left=["module"])


def _path(name: list[str]) -> tuple[str, ...]:
    """Return the module of a parameter; a parameter of the model itself, as "ends/embed", has a row of its own."""
    alone = name[0] in (ENDS, STACK) and len(name) == 2
    return tuple(name if alone else name[:-1])


def _cells(path: tuple[str, ...], size: LeafBytes, host: bool) -> list[str]:
    *device, on_host = size
    name = "  " * len(path) + path[-1] if path else "the model"
    return [name, *map(size_text, (*device, sum(device))), *[size_text(on_host)] * host]


EXHAUSTED = "RESOURCE_EXHAUSTED"  # the status of XLA's error when memory runs out


def check_memory(step: TrainStep) -> None:
    """Compare the peak of the step that was prepared with its device; devices without a limit are not checked.

    Raises:
      OutOfMemoryError: the peak is larger. All processes compile the same, and so raise the same.
    """
    there = usable_memory_here()
    if there is None:
        return
    with heartbeat.work(counts=False), slow_work(compiling("the step")):
        need = _planned(step, there)
    if not need.fits:
        raise OutOfMemoryError(explained(step, need, f"the step {need.verdict} per device", there.most))


def fits_data(step: TrainStep, loader: DataLoader, cut: Callable[[PyTree], PyTree], skip: SkipWhen) -> bool:
    """Compile the step for the training data before it begins, and check its memory, as `check_memory` does.

    Args:
      cut: cuts a batch to the length of the first step.
      skip: the conditions of the first step.

    Returns:
      False if only the first step can tell: of data without a length, which are not read ahead.
    """
    if usable_memory_here() is None or (part := run_on_all("training_data", loader.first)) is None:
        return False
    try:
        step.prepare([cut(part)] * step.batch_sizes.accum, None, skip, rows=step.micro_size)
        check_memory(step)
    except OutOfMemoryError:
        raise
    except Exception:  # the script may change these batches, or give the loss more; raised by all processes or none
        step.first = None  # no report traces this input
        return False
    return True


def explain_out_of_memory(step: TrainStep, error: jax.errors.JaxRuntimeError) -> None:
    """Raise an OutOfMemoryError that explains XLA's error, if memory ran out in a step."""
    there = usable_memory_here()
    if EXHAUSTED not in str(error) or there is None or step.traced is None or step.has_varied:
        return  # of several programs nothing tells which it was
    need = _planned(step, there)
    own, most = size_text(need.peak_bytes), size_text(there.most)
    what = (
        f"a step ran out of memory: it needs {own} per device; other arrays and fragmentation use the rest of XLA's "
        f"{most}"
    )
    # Of several processes maybe only this one is here, while the others wait in a collective: it compiles nothing.
    less = min(there.most, need.peak_bytes - 1) if jax.process_count() == 1 else None
    raise OutOfMemoryError(explained(step, need, what, less)) from error


def explained(step: TrainStep, need: PlannedMemory, what: str, most: int | None) -> str:
    """Return what a step needs, part by part, and the nearest configurations that fit into `most` bytes, if given."""
    parts = memory_section(need)._replace(note=""), live_section(need)._replace(note="")
    lines = [what, section_text(parts[0]), f"largest temporary buffers, in {need.live.at}:"]
    lines.append(section_text(parts[1], plain=True))
    if most is not None:
        shapes = step.first.batch_shapes  # type: ignore[union-attr]  # of the step that was prepared
        found = nearest(step, shapes, need.peak_bytes, most)
        lines.append(nearest_text(found, step, need.live))
    return "\n".join(lines)


def _planned(step: TrainStep, there: UsableMemory) -> PlannedMemory:
    compiled: jax.stages.Compiled = step.traced.lower().compile()  # type: ignore[union-attr]  # shared with the call
    return planned_memory(step, compiled, there)
