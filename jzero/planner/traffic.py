"""Counts the bytes that an operation or a fusion reads and writes."""

from __future__ import annotations

import math
from typing import NamedTuple

from jzero.planner.hlo import Computation, Instruction

_VIEWS = ("bitcast", "reshape")


class Traffic(NamedTuple):
    """Bytes read and written, and those of them that lie in host memory."""

    read: float
    written: float
    host_read: float = 0.0
    host_written: float = 0.0


def of_operation(op: Instruction, scope: Computation) -> Traffic:
    """Count the bytes of an operation outside fusions."""
    operands = [scope[name] for name in op.operands]
    read, written = float(sum(i.bytes for i in operands)), float(op.bytes)
    if op.opcode == "copy-start":  # its result is the copy, the original and a context
        read = written = op.arrays[0].bytes
    elif op.opcode == "dynamic-update-slice":
        read = written = operands[1].bytes
    elif op.opcode == "scatter":
        read = written = operands[-1].bytes
    elif op.opcode in ("slice", "dynamic-slice", "gather"):
        read = written
    elif op.opcode == "sort":
        read, written = _passes(op) * read, _passes(op) * written
    from_host = bool(operands) and any(array.on_host for array in operands[0].arrays)
    return Traffic(read, written, read * from_host, written * any(array.on_host for array in op.arrays[:1]))


def of_fusion(op: Instruction, inner: Computation) -> Traffic:
    """Count the bytes of a fusion, of a sliced or updated array only what is touched; `inner` is its computation."""
    users: dict[str, list[Instruction]] = {}
    for i in inner.values():
        for name in i.operands:
            users.setdefault(name, []).append(i)
    reads = [(i, _read(i.name, inner, users)) for i in inner.values() if i.opcode == "parameter"]
    root = next(i for i in inner.values() if i.root)
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    writes = [(i, _written(i, inner)) for i in results]
    outside = op.arrays if op.opcode == "fusion" and len(op.arrays) == len(results) else [None] * len(results)
    hosted = [
        any(array.on_host for array in i.arrays) or bool(whole and whole.on_host)
        for i, whole in zip(results, outside, strict=True)
    ]
    passes = max(1, sum(_passes(i) for i in inner.values() if i.opcode == "sort"))
    return Traffic(
        passes * sum(size for _, size in reads),
        passes * sum(size for _, size in writes),
        sum(size for i, size in reads if any(array.on_host for array in i.arrays)),
        sum(size for (_, size), there in zip(writes, hosted, strict=True) if there),
    )


def _read(name: str, inner: Computation, users: dict[str, list[Instruction]]) -> float:
    whole, total = inner[name].bytes, 0.0
    for user in users.get(name, []):
        first = user.operands[0] == name
        if first and user.opcode in ("slice", "dynamic-slice", "gather"):
            total += user.bytes
        elif first and user.opcode == "scatter":
            total += inner[user.operands[-1]].bytes
        elif user.opcode in _VIEWS and not user.root:
            total += _read(user.name, inner, users)
        elif not (first and user.opcode == "dynamic-update-slice"):
            return whole
    return min(whole, total)


def _written(i: Instruction, inner: Computation) -> float:
    while i.opcode in _VIEWS:
        i = inner[i.operands[0]]
    if i.opcode == "dynamic-update-slice":
        return inner[i.operands[1]].bytes
    return inner[i.operands[-1]].bytes if i.opcode == "scatter" else i.bytes


def _passes(sort: Instruction) -> int:
    """Count the passes of a sort over its arrays: one for each doubling of the sorted length."""
    (dimension,) = sort.numbers(r"dimensions=\{(\d+)\}")
    return max(1, math.ceil(math.log2(max(1, sort.arrays[0].dims[dimension]))))
