"""The lines of `memory_breakdown`: memory in use on the devices and the host, and what a step needs by its compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jzero.data.curriculum import Curriculum
from jzero.engine.text import size_text
from jzero.errors import with_type
from jzero.planner.memory import memory
from jzero.profiling.device_memory import fullest_first

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
