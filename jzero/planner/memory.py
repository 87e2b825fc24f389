"""Reads the device memory of a compiled program: XLA's figures, the buffers at the peak, and what a GPU has for XLA.

`live` walks over the instructions. XLA tells the size of its block of temporaries, but not what is in it. The order of
a scheduled module's instructions is the order in which they run, so a buffer lives from the instruction that makes it
to the last one that uses it. What shares a buffer: tuples and views; updates in place (of a slice, or as a library's
call declares); the state of a loop. The sum differs from XLA's block by some per cent: XLA also lets buffers of other
sizes share a place, and leaves gaps.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import jax
import numpy as np

from jzero.planner.hlo import Array, Computation, HloModule, Instruction, read_hlo, root_instructions
from jzero.planner.traced_operations import UNNAMED
from jzero.step.train_step import TrainStep

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATED = 0.75  # of the GPU's memory: JAX's default, see its page "GPU memory allocation"
# Assumed, not measured: what NCCL's communicators (buffers per channel and peer) and CUDA with its libraries (context,
# modules, cuBLAS's and cuDNN's workspaces) take beside XLA's memory.
NCCL_ROOM, CUDA_ROOM = int(1.5 * 2**30), 2**30


_VIEWS = ("bitcast", "tuple", "opt-barrier", "while", "dynamic-update-slice", "reshape")
_NOTHING = ("parameter", "constant", "partition-id", "replica-id", "after-all")
_ALIAS = re.compile(r"\{([\d,]*)\}: \((\d+), \{[\d,]*\}")
_WRAPPERS = re.compile(r"\w*\(|\)")


@dataclass(frozen=True)
class UsableMemory:
    """Bytes of one GPU.

    Attributes:
      device: all that CUDA reports.
      preallocated: what XLA takes at the start.
      most: the most that it could take: without NCCL's and CUDA's own, which are assumed.
      limit: what XLA's scheduler keeps a step's memory under, where it can.
      nccl: of NCCL's buffers.
    """

    device: int
    preallocated: int
    most: int
    limit: int
    nccl: int = 0


def usable_memory_here() -> UsableMemory | None:
    """Return what XLA has of this process's first device; None if it does not say, as CPUs do not."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return UsableMemory(limit, limit, limit, limit) if limit else None


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory that one device needs for one execution of a program."""

    arguments: int
    outputs: int
    aliased: int  # outputs that reuse a donated argument's memory
    temps: int
    code: int  # not in the peak; 0 on compilers that do not report it
    host: int = 0  # of host memory, not in the peak

    @property
    def peak(self) -> int:
        """arguments + outputs - aliased + temps: the bytes that must be free on the device."""
        return self.arguments + self.outputs - self.aliased + self.temps

    def __repr__(self) -> str:
        parts = {"arguments": self.arguments, "outputs": self.outputs, "aliased": self.aliased, "temps": self.temps}
        listed = ", ".join(f"{name} {value / 2**30:.3f}" for name, value in parts.items())
        host = f"; host {self.host / 2**30:.3f}" if self.host else ""
        return f"Memory(peak {self.peak / 2**30:.3f} GiB: {listed}{host})"


def memory(compiled: jax.stages.Compiled, step: TrainStep | None = None) -> Memory:
    """Read the compiler's memory analysis of a program, per device.

    Donate the state; otherwise its old and its new copy both count.

    Args:
        step: the step that was compiled, if its config offloads. The compilers for CPUs and for GPUs that are not there
            count a state in host memory as the device's; only a real GPU's tells the two apart. Activations in host
            memory (`cpu_checkpointing`) every GPU's compiler counts as such, and the one for CPUs as the device's.

    Raises:
        ValueError: the backend that compiled the program reports no memory analysis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> memory(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
        Memory(peak 0.004 GiB: arguments 0.004, outputs 0.004, aliased 0.004, temps 0.000)
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend reports no memory analysis; compile for 'cpu' or for a GPU of jzero.planner")
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    counted = step.host_bytes if step and not stats.host_argument_size_in_bytes else 0
    return Memory(
        arguments=stats.argument_size_in_bytes - counted,
        outputs=stats.output_size_in_bytes - counted,
        aliased=stats.alias_size_in_bytes - counted,
        temps=stats.temp_size_in_bytes + _flash_scratch(compiled),
        code=stats.generated_code_size_in_bytes,
        host=host + counted,
    )


def _flash_scratch(compiled: jax.stages.Compiled) -> int:
    """Count what one backward pass of FlashAttention-3 allocates outside of XLA's memory, the largest of the program.

    It sums the gradients of queries in float32, and those of keys and values if several heads share them; lengths are
    rounded up to blocks of 128.
    """
    if "flash_attn3_jax" not in sys.modules:
        return 0
    found = [0]
    for op, *_ in read_hlo(compiled).walk():
        if op.target == "flash_mha_bwd":
            queries, keys = ((b, -(-s // 128) * 128, h, c) for b, s, h, c in (x.dims for x in op.arrays[:2]))
            found.append(4 * prod(queries) + (8 * prod(keys) if keys != queries else 0))
    return max(found)


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


@dataclass(eq=False)
class _Made:
    """One array that an instruction makes; `free` ones lie in arguments, outputs, a loop's state or host memory."""

    array: Array
    by: Instruction
    free: bool = False
    last: int = -1

    @property
    def bytes(self) -> int:
        return 0 if self.free or self.array.on_host else self.array.bytes


def live(text: str) -> Live:
    """Find the buffers that are alive when a scheduled program needs the most temporary memory.

    Args:
      text: the optimized HLO module.

    Raises:
      ValueError: the module has no schedule.
    """
    module = read_hlo(text)
    if not module.scheduled:
        raise ValueError("live: the HLO module has no schedule (is_scheduled=true); compile the step for a GPU")
    total, at, made = _peak(module, module.entry, {})
    shapes = Counter((m.array.text, scopes(m.by.op_name) or m.by.opcode, m.bytes) for m in made if m.bytes)
    buffers = [Buffer(n, n * size, shape, name) for (shape, name, size), n in shapes.items()]
    return Live(total, scopes(at.op_name) or at.opcode if total else "", tuple(sorted(buffers, key=lambda b: -b.bytes)))


def scopes(op_name: str) -> str:
    """Return the name stack of an operation without JAX's transformations.

    >>> scopes("jit(step)/shard_map/transpose(jvp(stack))/mlp/gate_up/dot_general")
    'stack/mlp/gate_up/dot_general'
    """
    hidden = ("", "jit", "step", "shard_map", "while", "body", "closed_call")
    first = re.split("[;:]", op_name)[0]  # the first of a combined operation
    parts = [part for part in _WRAPPERS.sub("", first).split("/") if part not in hidden and not UNNAMED.fullmatch(part)]
    return "/".join(parts)


Peak = tuple[int, Instruction, list[_Made]]


def _peak(module: HloModule, computation: str, known: dict[str, Peak]) -> Peak:
    """Return (bytes, instruction, buffers) at the peak of a computation, without its arguments and result.

    `known` has the peaks that are found; each computation is walked once.
    """
    if computation in known:
        return known[computation]
    order = list(module.computations[computation].values())
    values: dict[str, list[_Made]] = {}
    for i, op in enumerate(order):
        values[op.name] = _value(module, op, values)
        used = [] if op.opcode == "get-tuple-element" else [m for name in op.operands for m in values.get(name, ())]
        for made in (*used, *values[op.name]):
            made.last = i
        for made in values[op.name] if op.root else ():
            made.free = True
    new = {id(made): (i, made) for i, op in enumerate(order) for made in values[op.name] if made.by is op}.values()
    changes, peaks = np.zeros(len(order) + 1, np.int64), []
    for first, made in new:
        changes[first] += made.bytes
        changes[made.last + 1] -= made.bytes
    for op, size in zip(order, changes.cumsum(), strict=False):
        # The computations whose buffers are alive while it runs; a fusion has none.
        runs = op.called() if op.opcode in ("while", "conditional", "call", "async-start") else ()
        inside = max((_peak(module, name, known) for name in runs), key=lambda peak: peak[0], default=(0, op, []))
        peaks.append((int(size) + inside[0], inside[1] if inside[0] else op, inside[2]))
    at = max(range(len(order)), key=lambda i: peaks[i][0])
    total, op, inner = peaks[at]
    known[computation] = total, op, [*(made for first, made in new if first <= at <= made.last), *inner]
    return known[computation]


def _value(module: HloModule, op: Instruction, values: dict[str, list[_Made]]) -> list[_Made]:
    """Return the arrays of an instruction's result: its operands' where they share them, otherwise new ones."""
    operands = [values.get(operand, []) for operand in op.operands]
    first, every = operands[0] if operands else [], [made for operand in operands for made in operand]
    if op.opcode in _NOTHING:
        return [_Made(array, op, free=True) for array in op.arrays]
    if op.opcode == "tuple":
        return every
    if op.opcode == "get-tuple-element":
        index = int(op.attribute(r"index=(\d+)") or 0)
        return first[index : index + 1] if len(op.arrays) == 1 else first
    if op.opcode.endswith(("-done", "-update")):
        return _outputs(first, op)
    if op.opcode in _VIEWS and len(first) == len(op.arrays):
        return first
    made = [_Made(array, op) for array in op.arrays]
    if op.opcode == "copy-start":  # its result has the original after the copy
        made[1:2] = every[:1]
    elif op.opcode.endswith("-start") and len(made) > len(every):  # other starts list operands before outputs
        made[: len(every)] = every
    for output, operand in _in_place(module, op):
        if output < len(made) and operand < len(operands) and operands[operand]:
            made[output] = operands[operand][0]
    return made


def _in_place(module: HloModule, op: Instruction) -> Iterator[tuple[int, int]]:
    """Yield (output, operand) of those that share a buffer."""
    if op.opcode == "custom-call":
        for output, operand in _ALIAS.findall(op.attribute(r"output_to_operand_aliasing=\{(.*?\)\s*)\}")):
            yield int(output or 0), int(operand)
    if op.opcode == "fusion":
        inside = module.computations[op.called()[0]]
        for i, result in enumerate(root_instructions(inside)):
            if (number := _updated(inside, result)) is not None:
                yield i, number


def _updated(inside: Computation, op: Instruction) -> int | None:
    """Return the number of the parameter that a fusion's result updates in place, if it does."""
    updates = False
    while op.opcode in ("bitcast", "dynamic-update-slice", "copy"):
        updates |= op.opcode == "dynamic-update-slice"
        op = inside[op.operands[0]]
    return int(op.arguments) if updates and op.opcode == "parameter" else None


def _outputs(first: list[_Made], op: Instruction) -> list[_Made]:
    """Return the outputs among the arrays of an asynchronous start, for its done."""
    wanted = list(op.arrays)
    if op.opcode == "copy-done":
        return first[:1]
    for start in range(len(first) - len(wanted), -1, -1):
        if [made.array.dims for made in first[start : start + len(wanted)]] == [array.dims for array in wanted]:
            return first[start : start + len(wanted)]
    return [_Made(array, op) for array in wanted]
