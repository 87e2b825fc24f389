"""A profile of one step: the time of a device in forward, backward, update and collectives, and their bandwidth.

A step is one program, so a clock on the host cannot time its parts. The profiler names the operation of each kernel,
and the metadata of the compiled program maps the operation to a part of the step.
"""

from __future__ import annotations

import atexit
import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from jzero.display.text_table import quantity, text_table
from jzero.planner.collectives import KINDS, Collective, Collectives
from jzero.step.update import SCOPE

FORWARD, BACKWARD, UPDATE, OTHER, COLLECTIVES = "forward", "backward", "update", "other", "collectives"
COMPUTE = (FORWARD, BACKWARD, UPDATE, OTHER)  # other: casts of the masters, sums of gradients, copies
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", re.MULTILINE)
_OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][a-z\-]*)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
HOST = "/host:CPU"  # the kernels of all simulated devices are events there
_CONTROL = ("while", "conditional", "call")  # their time is that of the operations inside


class Kernel(NamedTuple):
    """A kernel that ran on the device: its name, its operation's name, its start and end in ns."""

    name: str
    operation: str
    start: float
    end: float


class DeviceTimes(NamedTuple):
    """Milliseconds of each part; `hidden`: of collectives that compute overlaps, which are not in `parts`."""

    parts: dict[str, float]
    hidden: float


class Session:
    """A session of JAX's profiler, of which a process has one at a time.

    Attributes:
      directory: of its files; "" for a session that does nothing.
      problem: why there are no files.
    """

    def __init__(self, directory: str, **levels: int):
        self.directory, self.problem, self.is_running = directory, "", False
        self._levels = levels  # fields of `ProfileOptions`

    def start(self) -> None:
        if self.is_running or self.problem or not self.directory:
            return
        options = jax.profiler.ProfileOptions()
        for name, level in self._levels.items():
            setattr(options, name, level)
        try:
            jax.profiler.start_trace(self.directory, profiler_options=options)
        except (RuntimeError, OSError) as error:  # the script profiles
            self.problem = str(error)
            return
        self.is_running = True
        atexit.register(self.stop)  # a run that ends in a session

    def stop(self) -> None:
        """Write the files."""
        if self.is_running:
            self.is_running = False
            atexit.unregister(self.stop)
            try:
                jax.profiler.stop_trace()
            except (RuntimeError, OSError) as error:  # a full disk must not end the run
                self.problem = str(error)


class Profile(Session):
    """A profile of the first device of this process.

    Attributes:
      kernels: that ran between `start` and `stop`.
      is_new: whether they have not been read yet.
    """

    def __init__(self) -> None:
        of_host = 2 if jax.local_devices()[0].platform == "cpu" else 0  # CPU kernels are host events
        super().__init__(tempfile.mkdtemp(prefix="jzero-profile-"), python_tracer_level=0, host_tracer_level=of_host)
        self.kernels: list[Kernel] = []
        self.is_new = True

    def stop(self) -> None:
        super().stop()
        if not self.problem:
            for file in Path(self.directory).rglob("*.xplane.pb"):
                self.kernels = _read(file)
            self.problem = "" if self.kernels else "the profiler saw no kernels"
        shutil.rmtree(self.directory, ignore_errors=True)


def _read(file: Path) -> list[Kernel]:
    planes = {plane.name: plane for plane in jax.profiler.ProfileData.from_file(str(file)).planes}
    first = min((name for name in planes if name.startswith("/device:GPU:")), default=HOST)
    found = []
    with warnings.catch_warnings():  # jax 0.11's C++ aborts the process if Python makes its DeprecationWarning an error
        warnings.simplefilter("ignore", DeprecationWarning)
        for line in planes[first].lines if first in planes else ():
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and (first != HOST or stats.get("device_ordinal", 0) == 0):
                    start = float(event.start_ns)
                    found.append(Kernel(event.name, str(stats["hlo_op"]), start, start + float(event.duration_ns)))
    return found


def parts_of_instructions(text: str) -> dict[str, str]:
    """Map the instructions of a compiled program (HLO text) to parts of the step; "" for loops and calls.

    >>> parts_of_instructions('%dot.3 = f32[2] dot(%a), metadata={op_name="jit(step)/transpose(jvp())/dot_general"}')
    {'dot.3': 'backward'}
    """
    found = {}
    for name, rest in _INSTRUCTION.findall(text):
        opcode, op_name = _OPCODE.search(rest), _OP_NAME.search(rest)
        found[name] = _part(opcode[1] if opcode else "", op_name[1] if op_name else "")
    return found


def _part(opcode: str, op_name: str) -> str:
    if opcode.startswith(KINDS):
        return COLLECTIVES
    if opcode in _CONTROL:
        return ""
    return (
        UPDATE if SCOPE in op_name else BACKWARD if "transpose(" in op_name else FORWARD if "jvp(" in op_name else OTHER
    )


def device_times(kernels: Iterable[Kernel], parts: dict[str, str]) -> DeviceTimes:
    """Add up the time of each part; where kernels overlap, the time counts as compute.

    Args:
      parts: of the program that ran, by `parts_of`.
    """
    edges: list[tuple[float, int, str]] = []
    for kernel in kernels:
        collective = kernel.name.startswith("nccl") or kernel.operation.replace("_", "-").startswith(KINDS)
        if part := COLLECTIVES if collective else parts.get(kernel.operation, OTHER):
            edges += [(kernel.start, 1, part), (kernel.end, -1, part)]
    spent, hidden, before = dict.fromkeys((*COMPUTE, COLLECTIVES), 0.0), 0.0, 0.0
    running = dict.fromkeys(spent, 0)
    for now, change, part in sorted(edges):
        if on_top := next((part for part in spent if running[part]), None):
            spent[on_top] += now - before
            hidden += (now - before) * (on_top != COLLECTIVES and running[COLLECTIVES] > 0)
        running[part] += change
        before = now
    return DeviceTimes({part: ns / 1e6 for part, ns in spent.items() if ns}, hidden / 1e6)


def device_line(step: int, times: DeviceTimes) -> str:
    """Format the parts of a profiled step.

    >>> device_line(10, DeviceTimes({"forward": 6.84, "backward": 15.0, "collectives": 1.2}, 2.25))
    'step 10, profiled: device 23.0 ms = forward 6.8 + backward 15.0 + collectives 1.2 (and 2.2 overlapped)'
    """
    listed = " + ".join(f"{part} {ms:.1f}" for part, ms in times.parts.items())
    behind = f" (and {times.hidden:.1f} overlapped)" if COLLECTIVES in times.parts or times.hidden else ""
    return f"step {step}, profiled: device {sum(times.parts.values()):.1f} ms = {listed}{behind}"


# ------------------------------------------------------------------ the table of collectives, with their bandwidth

# NCCL's names in the names of its kernels. SendRecv is a permute or a part of an all-to-all: the operation tells.
_NCCL = {"AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "AllReduce": "all-reduce"}

_LEFT = ("collective", "axes", "dtype", "in loops of", "operation")


def communication(
    found: Collectives, kinds: Collection[str] = KINDS, *, each: bool = False, names: bool = False,
    kernels: Iterable[Kernel] = (), title: str = "collectives of a step",
) -> str:  # fmt: skip
    """Draw the collectives of a step on one device, and the bandwidth of each kind.

    Args:
      kinds: to draw.
      each: a row for every operation of the program, instead of one for all that are alike.
      names: with the JAX names of the operations; rows are alike only if these are.
      kernels: of a profile of one such step; none: without times.
    """
    rows = [row for row in found if row.kind in kinds]
    if not rows:
        return f"{title}: none" + (f" of {', '.join(kinds)}" if len(kinds) < len(KINDS) else "")
    groups: dict[Collective, list[Collective]] = {}
    for i, row in enumerate(rows):
        alike = replace(row, operands=i if each else 0, op_name=row.op_name if names else "")
        groups.setdefault(alike, []).append(row)
    cells = [_cells(alike, len(group), names) for alike, group in groups.items()]
    columns = [*_LEFT[:4], "devices", "times", "bytes each", "bytes", *_LEFT[4:][: int(names)]]
    milliseconds = collective_times(kernels)
    lines = [_total(kind, [row for row in rows if row.kind == kind], milliseconds) for kind in KINDS if kind in kinds]
    return "\n".join([text_table(title, columns, cells, left=_LEFT), *filter(None, lines)])


def _cells(row: Collective, alike: int, names: bool) -> list[str]:
    axes = "?" if row.axes is None else ",".join(row.axes) or "-"
    loops = " x ".join("?" if trips is None else str(trips) for trips in row.loops) or "-"
    kind = f"{row.kind}, in a branch" if row.in_branch else row.kind
    n = alike * row.times
    cells = [kind, axes, row.dtype, loops, str(row.group_size), str(n), quantity(row.bytes, "B")]
    return [*cells, quantity(n * row.bytes, "B"), *[row.op_name] * names]


def _total(kind: str, rows: list[Collective], milliseconds: dict[str, float]) -> str:
    """Return the line of a kind: its bytes, and its bandwidth as nccl-tests defines it."""
    if not rows:
        return ""
    launches, moved = sum(row.times for row in rows), sum(row.bytes * row.times for row in rows)
    line = f"{kind}: {launches} a step, {quantity(moved, 'B')}"
    if any(row.in_branch or None in row.loops for row in rows):
        return f"{line}; how often those in branches and loops of unknown length run is not known"
    if not (ms := milliseconds.get(kind)):
        return line
    on_wire = sum(row.bytes * row.times * wire_share(kind, row.group_size) for row in rows)
    return (
        f"{line} in {ms:.2f} ms: {moved / ms / 1e6:.1f} GB/s, bus {on_wire / ms / 1e6:.1f} GB/s "
        "(the time contains the wait for the slowest device)"
    )


def wire_share(kind: str, devices: int) -> float:
    """Return the bytes that a device sends per byte of the full buffer, by a ring: nccl-tests' factor of bus bandwidth.

    >>> wire_share("all-reduce", 4), wire_share("all-gather", 4), wire_share("collective-permute", 4)
    (1.5, 0.75, 1.0)
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (devices - 1) / devices


def collective_times(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Add up the milliseconds of each kind of collective; time in which several of one kind run counts once."""
    ends: dict[str, float] = {}
    found: dict[str, float] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kind := collective_kind(kernel):
            begin = max(kernel.start, ends.get(kind, -math.inf))
            found[kind] = found.get(kind, 0.0) + max(0.0, kernel.end - begin) / 1e6
            ends[kind] = max(kernel.end, ends.get(kind, -math.inf))
    return found


def collective_kind(kernel: Kernel) -> str:
    """Return the kind of collective of a kernel; "" if it is none.

    >>> collective_kind(Kernel("ncclDevKernel_AllGather_RING_LL(args)", "async-start.3", 0, 1))
    'all-gather'
    """
    operation = kernel.operation.replace("_", "-")
    # The longest first: "ragged-all-to-all" is a name of its own.
    if named := next((kind for kind in KINDS if operation.startswith(kind)), ""):
        return named
    if kernel.name.startswith("nccl"):
        return next((kind for name, kind in _NCCL.items() if f"_{name}_" in kernel.name), "")
    return ""
