"""Which buffers are alive at the peak of a scheduled program: a walk over its instructions.

XLA tells the size of its block of temporaries, but not what is in it. The order of a scheduled module's instructions is
the order in which they run, so a buffer lives from the instruction that makes it to the last one that uses it. What
shares a buffer: tuples and views; updates in place (of a slice, or as a library's call declares); the state of a loop.
The sum differs from XLA's block by some per cent: XLA also lets buffers of other sizes share a place, and leaves gaps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jzero.planner.hlo import Array, Computation, Instruction, Module, read
from jzero.planner.products import UNNAMED

_VIEWS = ("bitcast", "tuple", "opt-barrier", "while", "dynamic-update-slice", "reshape")
_NOTHING = ("parameter", "constant", "partition-id", "replica-id", "after-all")
_ALIAS = re.compile(r"\{([\d,]*)\}: \((\d+), \{[\d,]*\}")
_WRAPPERS = re.compile(r"\w*\(|\)")


@dataclass(frozen=True)
class Buffer:
    """Buffers of one shape from one operation, alive at the same time.

    Attributes:
      count, bytes: how many there are, and the bytes of all of them.
      shape: of each, as "bf16[4096,8192]".
      op_name: the scopes of the operation, as "stack/mlp/gate_up/dot_general".
    """

    count: int
    bytes: int
    shape: str
    op_name: str


@dataclass(frozen=True)
class Live:
    """The buffers at the peak, the largest first.

    Attributes:
      peak_bytes: their sum.
      at: the operation that runs at the peak.
    """

    peak_bytes: int
    at: str
    buffers: tuple[Buffer, ...]


class _Made:
    """One array that an instruction makes; `free` ones lie in arguments, outputs, a loop's state or host memory."""

    def __init__(self, array: Array, by: Instruction):
        self.array, self.by, self.free = array, by, array.on_host
        self.last = -1

    @property
    def bytes(self) -> int:
        return 0 if self.free else self.array.bytes


def live(text: str) -> Live:
    """Find the buffers that are alive when a scheduled program needs the most temporary memory.

    Args:
      text: the optimized HLO module.

    Raises:
      ValueError: the module has no schedule.
    """
    module = read(text)
    if not module.scheduled:
        raise ValueError("live: the HLO module has no schedule (is_scheduled=true); compile the step for a GPU")
    total, at, made = _Walk(module).peak(module.entry)
    shapes = Counter((_shape(m.array), scopes(m.by.op_name) or m.by.opcode, m.bytes) for m in made if m.bytes)
    buffers = [Buffer(n, n * size, shape, name) for (shape, name, size), n in shapes.items()]
    return Live(total, scopes(at.op_name) or at.opcode if at else "", tuple(sorted(buffers, key=lambda b: -b.bytes)))


def _shape(array: Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.dims))}]"


def scopes(op_name: str) -> str:
    """Return the name stack of an operation without JAX's transformations.

    >>> scopes("jit(step)/shard_map/transpose(jvp(stack))/mlp/gate_up/dot_general")
    'stack/mlp/gate_up/dot_general'
    """
    hidden = ("", "jit", "step", "shard_map", "while", "body", "closed_call")
    first = re.split("[;:]", op_name)[0]  # the first of a combined operation
    parts = [part for part in _WRAPPERS.sub("", first).split("/") if part not in hidden and not UNNAMED.fullmatch(part)]
    return "/".join(parts)


Peak = tuple[int, Instruction | None, list[_Made]]


class _Walk:
    """The walk; the peak of each computation is found once."""

    def __init__(self, module: Module):
        self.module = module
        self.peaks: dict[str, Peak] = {}

    def peak(self, computation: str) -> Peak:
        """Return (bytes, instruction, buffers) at the peak of a computation, without its arguments and result."""
        if computation not in self.peaks:
            self.peaks[computation] = self._peak(list(self.module.computations[computation].values()))
        return self.peaks[computation]

    def _peak(self, order: list[Instruction]) -> Peak:
        values: dict[str, list[_Made]] = {}
        for i, op in enumerate(order):
            values[op.name] = self._value(op, values)
            used = [] if op.opcode == "get-tuple-element" else [m for name in op.operands for m in values.get(name, ())]
            for made in (*used, *values[op.name]):
                made.last = i
            if op.root:
                for made in values[op.name]:
                    made.free = True
        return self._sweep(order, values)

    def _sweep(self, order: list[Instruction], values: dict[str, list[_Made]]) -> Peak:
        alive: dict[int, _Made] = {}
        size, best = 0, (0, None, [])  # type: tuple[int, Peak]
        for i, op in enumerate(order):
            for made in values[op.name]:
                if id(made) not in alive and made.by is op:
                    alive[id(made)] = made
                    size += made.bytes
            inside = max((self.peak(name) for name in self._runs(op)), key=lambda peak: peak[0], default=(0, None, []))
            if size + inside[0] > best[0]:
                best = (size + inside[0], inside[1] or op, [*alive.values(), *inside[2]])
            for key in [key for key, made in alive.items() if made.last <= i]:
                size -= alive.pop(key).bytes
        return best

    def _runs(self, op: Instruction) -> tuple[str, ...]:
        """Return the computations whose buffers are alive while an instruction runs; a fusion has none."""
        return op.called() if op.opcode in ("while", "conditional", "call", "async-start") else ()

    def _value(self, op: Instruction, values: dict[str, list[_Made]]) -> list[_Made]:
        """Return the arrays of an instruction's result: its operands' where they share them, otherwise new ones."""
        first = values.get(op.operands[0], []) if op.operands else []
        if op.opcode in _NOTHING:
            return [_free(array, op) for array in op.arrays]
        if op.opcode == "tuple":
            return [made for operand in op.operands for made in values.get(operand, ())]
        if op.opcode == "get-tuple-element":
            index = int(op.attribute(r"index=(\d+)") or 0)
            return first[index : index + 1] if len(op.arrays) == 1 else first
        if op.opcode.endswith(("-done", "-update")):
            return _outputs(first, op)
        if op.opcode in _VIEWS and len(first) == len(op.arrays):
            return first
        made = [_Made(array, op) for array in op.arrays]
        operands = [values.get(operand, []) for operand in op.operands]
        if op.opcode.endswith("-start"):
            _share_operands(op, made, [x for operand in operands for x in operand])
        for output, operand in self._in_place(op):
            if output < len(made) and operand < len(operands) and operands[operand]:
                made[output] = operands[operand][0]
        return made

    def _in_place(self, op: Instruction) -> Iterator[tuple[int, int]]:
        """Yield (output, operand) of those that share a buffer."""
        if op.opcode == "custom-call":
            listed = op.attribute(r"output_to_operand_aliasing=\{(.*?\)\s*)\}")
            for output, operand in _ALIAS.findall(listed):
                yield int(output or 0), int(operand)
        if op.opcode == "fusion":
            inside = self.module.computations[op.called()[0]]
            root = next(i for i in inside.values() if i.root)
            results = root.operands if root.opcode == "tuple" else (root.name,)
            for i, name in enumerate(results):
                if (number := _updated(inside, name)) is not None:
                    yield i, number


def _updated(inside: Computation, name: str) -> int | None:
    """Return the number of the parameter that a fusion's result updates in place, if it does."""
    op = inside[name]
    while op.opcode in ("bitcast", "copy") and op.operands:
        op = inside[op.operands[0]]
    if op.opcode != "dynamic-update-slice":
        return None
    while op.opcode in ("bitcast", "dynamic-update-slice", "copy"):
        op = inside[op.operands[0]]
    return int(op.arguments) if op.opcode == "parameter" else None


def _free(array: Array, op: Instruction) -> _Made:
    made = _Made(array, op)
    made.free = True
    return made


def _outputs(first: list[_Made], op: Instruction) -> list[_Made]:
    """Return the outputs among the arrays of an asynchronous start, for its done."""
    wanted = list(op.arrays)
    if op.opcode == "copy-done":
        return first[:1]
    for start in range(len(first) - len(wanted), -1, -1):
        if [made.array.dims for made in first[start : start + len(wanted)]] == [array.dims for array in wanted]:
            return first[start : start + len(wanted)]
    return [_Made(array, op) for array in wanted]


def _share_operands(op: Instruction, made: list[_Made], operands: list[_Made]) -> None:
    """Let the result of a start contain its operands: it lists them before the outputs, a copy after its output."""
    if op.opcode == "copy-start":
        made[1:2] = operands[:1]
    elif len(made) > len(operands):
        made[: len(operands)] = operands
