"""Reads the text of an optimized HLO module into computations and instructions.

Each line of a computation is one instruction: ``%name = type opcode(%operand, ...), attribute=value, ...``. The order
of the lines in a scheduled module is the order in which XLA enqueues them. Operands may be printed without types, so
their shapes are looked up by name in the same computation.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f8e8m0fnu": 8, "f4e2m1fn": 4}
BITS |= {f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)}
BITS |= {f"f8{kind}": 8 for kind in ("e5m2", "e4m3", "e3m4", "e4m3fn", "e4m3b11fnuz", "e5m2fnuz", "e4m3fnuz")}

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_CALLED = {"while": "condition|body", "conditional": "true_computation|false_computation", "call": "to_apply|calls"}
_HOST = "S(5)"  # in a layout: the memory space of the host


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result: HLO's name of its element type, its dimensions, and where it lies."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""  # "1,0", without tiles
    on_host: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def text(self) -> str:
        """Return its type as "bf16[4096,8192]"."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def bytes(self) -> int:
        """Return the bytes of its elements; types of less than a byte are packed."""
        return (self.elements * BITS[self.dtype] + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        arrays: of the result, in order; tuples are flattened and tokens left out.
        arguments: the text between the parentheses: ``%p, %q``, or the number of a parameter.
        operands: the names in it.
        attributes: the text after the parentheses.
        root: whether it is the computation's result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    arguments: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def on_host(self) -> bool:
        return any(array.on_host for array in self.arrays)

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.arrays)

    @property
    def op_name(self) -> str:
        """Return the JAX name stack of the operation, or an empty text."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def target(self) -> str:
        """Return the name of the library's function that a custom call runs, or an empty text."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """Return what the first group of a pattern finds in the attributes, or an empty text."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def numbers(self, pattern: str) -> tuple[int, ...]:
        """Return the integers in what the first group of a pattern finds: ``{1,0}``, ``["1","0"]`` or ``3x3``."""
        return tuple(int(number) for number in re.findall(r"\d+", self.attribute(pattern)))

    @property
    def trips(self) -> int | None:
        """Return how often a while loop runs its body; None if the compiler does not know."""
        count = self.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return int(count) if count else None

    def called(self) -> tuple[str, ...]:
        """Return the names of the computations that it executes.

        A while loop executes its condition and its body; a conditional one of its branches; a call its ``to_apply``,
        which elsewhere (reduce, sort, all-reduce) is a function of scalars.
        """
        names = re.findall(rf"\b(?:{_CALLED.get(self.opcode, 'calls')})=%?([\w.\-]+)", self.attributes)
        if self.opcode == "conditional":
            for listed in re.findall(r"\bbranch_computations=\{([^}]*)\}", self.attributes):
                names += [name.strip().lstrip("%") for name in listed.split(",")]
        return tuple(names)


class UnreadableProgram(ValueError):
    """An instruction whose time this reader cannot tell."""

    def __init__(self, instruction: Instruction, why: str):
        what = f"{instruction.opcode} {instruction.target}".strip()
        super().__init__(f"step_time: %{instruction.name} ({what}): {why}; a step's time would be wrong without it")


Computation = dict[str, Instruction]


def root_instructions(computation: Computation) -> list[Instruction]:
    """Return the instructions whose results a computation returns, those of a tuple one by one."""
    root = next(i for i in computation.values() if i.root)
    return [computation[name] for name in root.operands] if root.opcode == "tuple" else [root]


class Executed(NamedTuple):
    """An instruction that a module executes.

    Attributes:
        scope: its computation.
        loops: trip counts of the loops around it, outermost first; None for a count that the compiler does not know.
        in_branch: under a conditional.
    """

    op: Instruction
    scope: Computation
    loops: tuple[int | None, ...]
    in_branch: bool


@dataclass(frozen=True)
class HloModule:
    """An HLO module: its computations by name, the name of the entry, and how many devices it runs on."""

    computations: dict[str, Computation]
    entry: str
    devices: int
    scheduled: bool

    def walk(
        self, computation: str = "", loops: tuple[int | None, ...] = (), in_branch: bool = False
    ) -> Iterator[Executed]:
        """Yield what a computation executes, by default the entry, with what it calls, however deep."""
        scope = self.computations[computation or self.entry]
        for op in scope.values():
            yield Executed(op, scope, loops, in_branch)
            if op.opcode.endswith(("-done", "-update")):
                continue  # its start has the calls
            around = (*loops, op.trips) if op.opcode == "while" else loops
            for name in op.called():
                yield from self.walk(name, around, in_branch or op.opcode == "conditional")


def read_hlo(compiled: jax.stages.Compiled | str) -> HloModule:
    """Read a compiled program, or the text of its optimized HLO module.

    Raises:
        ValueError: the backend does not provide the text, or it is not an HLO module.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if text is None:
        raise ValueError("this backend does not provide its optimized HLO")
    return _read(text)


@functools.lru_cache(maxsize=2)  # a plan reads the same text several times
def _read(text: str) -> HloModule:
    header, *lines = text.splitlines()
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in lines:
        if current is None:
            if start := _COMPUTATION.match(line):
                current = computations.setdefault(start[2], {})
                entry = start[2] if start[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            current[found[2]] = _instruction(found[2], found[3], bool(found[1]))
    if not entry:
        raise ValueError(f"not an HLO module, it has no ENTRY computation: {header[:80]!r}")
    return HloModule(computations, entry, math.prod(map(int, counts)), "is_scheduled=true" in header)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    opcode = _OPCODE.search(" " + text)  # a type has no " word(": its layouts follow a "{"
    if opcode is None:
        raise ValueError(f"not an HLO instruction: {name} = {text[:120]!r}")
    kind, rest = text[: max(0, opcode.start() - 1)], text[opcode.end() - 1 :]
    end = _closing(rest)
    arguments = rest[:end]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(name, opcode[1], _arrays(kind), arguments, operands, rest[end + 1 :], root)


def _closing(text: str) -> int:
    """Return the position of the parenthesis that closes the one before the text."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)


@functools.lru_cache(maxsize=4096)
def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(
            dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), layout.partition(":")[0], _HOST in layout
        )
        for dtype, dims, layout in _ARRAY.findall(text)
        if dtype in BITS
    )


def group_text(instruction: Instruction) -> tuple[str, bool]:
    """Return the text of a collective's replica groups or source-target pairs, and whether it is pairs."""
    if pairs := instruction.attribute(r"source_target_pairs=(\{\{.*?\}\})"):
        return pairs, True
    return instruction.attribute(r"replica_groups=(.*?)(?=, \w+=[^(]|$)") or "{}", False


def groups(text: str, devices: int) -> list[list[int]]:
    """Parse replica groups, in any form that XLA prints, into lists of device numbers (positions in the mesh)."""
    text = text.strip()
    if text == "{}":
        return [list(range(devices))]
    if text.startswith("{{"):  # {{0,1},{2,3}}
        return [_ints(group) for group in re.findall(r"\{([\d,\s]+)\}", text)]
    if iota := re.match(r"(\[[\d,]+\])<=(\S+)$", text):  # [4,2]<=[2,4]T(1,0)
        return _iota(iota[2]).reshape(_ints(iota[1])).tolist()
    if named := re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}$", text):  # mesh['a'=2,'b'=4] {'b'}
        sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", named[1])}
        ids = _iota(f"[{devices}]") if named[2] is None else _iota(named[2])
        shape: list[int] = []  # every axis, divided where a group takes part of it: 'a':(pre)size
        inside: list[int] = []  # dimensions of `shape` that vary inside a group
        parts = [re.fullmatch(r"(.*?)(?::\((\d+)\)(\d+))?", part.strip()) for part in named[3].split(",") if part]
        for name, size in sizes.items():
            cuts = sorted((int(p[2] or 1), int(p[3] or size)) for p in parts if p and p[1] == name)
            done = 1
            for before, taken in cuts:
                shape += [before // done, taken]
                inside.append(len(shape) - 1)
                done = before * taken
            shape.append(size // done)
        outside = [d for d in range(len(shape)) if d not in inside]
        return ids.reshape(shape).transpose(outside + inside).reshape(-1, math.prod(shape[d] for d in inside)).tolist()
    raise ValueError(f"replica_groups have an unknown form: {text[:120]!r}")


def _iota(text: str) -> np.ndarray:
    """Parse device numbers from ``[8]``, ``[2,4]T(1,0)`` or a plain list ``0,2,1,3``."""
    if counted := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$", text):
        dims = _ints(counted[1])
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(_ints(counted[2])) if counted[2] else ids).reshape(-1)
    return np.array(_ints(text))


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def longest_chain(pairs: list[list[int]]) -> int:
    """Return the size of the largest set of devices that the pairs connect."""
    member: dict[int, set[int]] = {}
    for pair in pairs:
        source, target = pair
        joined = member.get(source, {source}) | member.get(target, {target})
        member |= dict.fromkeys(joined, joined)  # every device of a connected set maps to the whole set
    return max((len(group) for group in member.values()), default=1)
