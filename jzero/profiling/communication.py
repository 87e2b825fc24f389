"""The collectives of a compiled step as a table, with the bandwidth that a profile of one step shows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from jzero.display.text_table import quantity, text_table
from jzero.planner.collectives import KINDS, Collective, Collectives
from jzero.profiling.device_times import Kernel

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
