"""Counts the bytes that an operation or a fusion reads and writes."""

from __future__ import annotations

import math
from typing import NamedTuple

from jzero.planner.hlo import Computation, Instruction

_VIEWS = ("bitcast", "reshape")
_ELEMENTWISE = (
    "abs", "add", "and", "bitcast-convert", "clamp", "compare", "convert", "divide", "exponential", "is-finite",
    "maximum", "minimum", "multiply", "negate", "not", "or", "power", "rsqrt", "select", "sqrt", "subtract", "tanh",
    "xor",
)  # fmt: skip
_THROUGH = _VIEWS + _ELEMENTWISE


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
    """Count the bytes that a fusion reads of a parameter; of slices of it, or of an elementwise result, only theirs."""
    whole = inner[name]
    shares: dict[str, float] = {}  # of the array, by the instruction that takes them
    waiting, seen, same = [name], {name}, {name}  # same: views of the parameter, which can be updated in place
    while waiting:
        at = waiting.pop()
        size = max(1, inner[at].elements)
        for user in users.get(at, []):
            first = user.operands[0] == at
            if first and user.opcode in ("slice", "dynamic-slice", "gather"):
                shares[user.name] = user.elements / size
            elif first and at in same and user.opcode == "scatter":
                shares[user.name] = inner[user.operands[-1]].elements / size
            elif first and at in same and user.opcode == "dynamic-update-slice":
                continue
            elif user.opcode in _THROUGH and not user.root:
                if at in same and user.opcode in _VIEWS:
                    same.add(user.name)
                if user.name not in seen:
                    seen.add(user.name)
                    waiting.append(user.name)
            else:
                return whole.bytes
    return whole.bytes * min(1.0, sum(shares.values()))


def _written(i: Instruction, inner: Computation) -> float:
    i = _origin(i, inner)
    if (
        i.opcode not in ("dynamic-update-slice", "scatter")
        or _origin(inner[i.operands[0]], inner).opcode != "parameter"
    ):
        return i.bytes
    return inner[i.operands[1 if i.opcode == "dynamic-update-slice" else -1]].bytes


def _origin(i: Instruction, inner: Computation) -> Instruction:
    """Return what a view is of."""
    while i.opcode in _VIEWS:
        i = inner[i.operands[0]]
    return i


def _passes(sort: Instruction) -> int:
    """Count the passes of a sort over its arrays: one for each doubling of the sorted length."""
    (dimension,) = sort.numbers(r"dimensions=\{(\d+)\}")
    return max(1, math.ceil(math.log2(max(1, sort.arrays[0].dims[dimension]))))
