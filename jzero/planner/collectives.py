"""Lists every collective of a compiled program, read from its optimized HLO; and prices each.

The optimized HLO is the program that runs, after XLA has combined, split, hoisted or made asynchronous the collectives
of the source. A computation that is reached twice counts twice.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace

import jax
import numpy as np

from jzero.display.text_table import text_table
from jzero.errors import ConfigError
from jzero.planner.hlo import (
    BITS,
    Computation,
    Executed,
    HloModule,
    Instruction,
    UnreadableProgram,
    group_text,
    groups,
    longest_chain,
    read_hlo,
)
from jzero.planner.kernel_costs import Cost
from jzero.planner.rates import Rates, at_most

KINDS = (
    "all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all", "ragged-all-to-all",
    "collective-broadcast",
)  # fmt: skip
# Seconds per hop of NCCL's rings and trees, protocol LL128 (hwLat in NCCL's src/graph/tuning.cc): NVLink, network.
_RING, _TREE = (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)

MeshShape = tuple[tuple[str, int], ...] | None


@dataclass(frozen=True)
class Collective:
    """One collective operation of the program, or one dtype's part of it where an operation combines several.

    Attributes:
        kind: one of ``KINDS``.
        dtype: HLO's name of the element type: "f32", "bf16", "s32".
        operands: number of arrays that the operation moves; more than one if the compiler combined operations.
        bytes: size of the *full* buffers, summed over ``operands``, for one execution on one device. all-gather: the
            gathered output; reduce-scatter and all-reduce: the unreduced input; collective-permute: the array sent;
            all-to-all: the device's whole input, including its own part (ragged: the most that it may be). The bytes
            that a device sends follow from it and ``group_size`` n: (n-1)/n of it for all-gather, reduce-scatter and
            all-to-all, twice that for a ring all-reduce, all of it for collective-permute.
        axes: names of the mesh axes whose coordinate varies inside a group, in mesh order; None without a mesh.
        group_size: devices in a group; for collective-permute the longest ring or chain of its pairs.
        loops: trip counts of the enclosing loops, outermost first; None for a count that the compiler does not know.
        in_branch: under a conditional, so it may not be executed.
        op_name: the JAX name stack of the operation; for a combined operation, of its first part.
    """

    kind: str
    dtype: str
    operands: int
    bytes: int
    axes: tuple[str, ...] | None
    group_size: int
    loops: tuple[int | None, ...] = ()
    in_branch: bool = False
    op_name: str = ""

    @property
    def times(self) -> int:
        """Executions per run of the program: the product of ``loops``, with 1 for an unknown trip count."""
        return math.prod(1 if trips is None else trips for trips in self.loops)


class Collectives(tuple[Collective, ...]):
    """The collectives of one program, a tuple. ``select`` from it, print it.

    The totals count a collective in a branch as if it always executed; ``select(in_branch=False)`` excludes it.
    """

    __slots__ = ()

    @property
    def launches(self) -> int:
        """Collective operations executed per run of the program."""
        return sum(row.times for row in self)

    @property
    def operands(self) -> int:
        """Arrays moved per run: operands x times.

        Combining all-gathers or reduce-scatters does not change it. Combining all-reduces does: XLA's GPU compiler
        concatenates those of one dtype into one array. A combine threshold of 0 bytes keeps them apart.
        """
        return sum(row.operands * row.times for row in self)

    @property
    def bytes(self) -> int:
        """Bytes of full buffers per run and device: bytes x times."""
        return sum(row.bytes * row.times for row in self)

    @property
    def unknown_trips(self) -> bool:
        """Return whether a collective is in a loop of unknown trip count; the totals are lower bounds then."""
        return any(None in row.loops for row in self)

    def select(
        self,
        *,
        kind: str | None = None,
        dtype: str | None = None,
        axes: str | tuple[str, ...] | None = None,
        loops: tuple[int | None, ...] | None = None,
        in_loop: bool | None = None,
        in_branch: bool | None = None,
        op_name: str | None = None,
    ) -> "Collectives":
        """Select the rows that meet every given condition.

        Args:
            kind, dtype: as in ``Collective``.
            axes: exactly these mesh axes, in any order; a string is one axis.
            loops: exactly these trip counts, outermost first; ``()`` is outside every loop.
            in_loop: inside some loop (True) or outside all (False).
            in_branch: under a conditional or not.
            op_name: a substring of the row's.

        Raises:
            ConfigError: a kind or dtype that does not exist, or ``axes`` on collectives read without a mesh.
        """
        if kind is not None and kind not in KINDS:
            raise ConfigError(f"kind = {kind!r}: unknown collective; allowed: {', '.join(KINDS)}")
        if dtype is not None and dtype not in BITS:
            raise ConfigError(f"dtype = {dtype!r}: unknown HLO element type; use a short name such as 'f32' or 'bf16'")
        if axes is not None and any(row.axes is None for row in self):
            raise ConfigError(f"axes = {axes!r}: read without a mesh; fix: collectives(compiled, mesh)")
        equal = {"kind": kind, "dtype": dtype, "loops": loops, "in_branch": in_branch}
        wanted = {axes} if isinstance(axes, str) else set(axes or ())
        return Collectives(
            row
            for row in self
            if all(value is None or getattr(row, name) == value for name, value in equal.items())
            and (axes is None or set(row.axes or ()) == wanted)
            and (in_loop is None or bool(row.loops) == in_loop)
            and (op_name is None or op_name in row.op_name)
        )

    def __repr__(self) -> str:
        """Format a plain table; rows that differ only in op_name share a line that starts with their number."""
        rows = []
        for row, n in distinct(self).items():
            axes, branch = "?" if row.axes is None else ",".join(row.axes) or "-", "yes" if row.in_branch else "-"
            each, total = f"{row.bytes / 2**20:.3f}", f"{n * row.bytes * row.times / 2**20:.3f}"
            line = (n, row.kind, row.dtype, row.operands, each, axes, row.group_size, loops_text(row), branch, total)
            rows.append([str(cell) for cell in line])
        columns = ["n", "kind", "dtype", "operands", "MiB", "axes", "group", "loops", "branch", "MiB/run"]
        drawn = text_table("", columns, rows, ["kind", "dtype", "axes", "loops", "branch"], plain=True).lstrip()
        flag = "; some trip counts unknown, taken as 1" if self.unknown_trips else ""
        return (
            f"{drawn}\n{self.launches} launches, {self.operands} operands, {self.bytes / 2**20:.3f} MiB per run{flag}"
        )


def collectives(compiled: jax.stages.Compiled | str, mesh: jax.sharding.Mesh | None = None) -> Collectives:
    """List every collective of a compiled program.

    Synchronous, ``-start``/``-done`` and wrapped asynchronous forms count once each. Trip counts are XLA's own
    (``known_trip_count``: of any ``lax.scan``, and of a ``fori_loop`` with constant bounds).

    Args:
        compiled: from ``jax.jit(f).lower(...).compile()``, or the text of its optimized HLO module.
        mesh: of the program; without it, ``axes`` is None.

    Raises:
        ConfigError: the mesh and the program have different numbers of devices.
        ValueError: the HLO text has a form that this reader does not know.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> from jzero.planner import gpu_devices
        >>> jax.config.update("jax_platforms", "cpu")
        >>> mesh = Mesh(np.array(gpu_devices("h100", 8)), ("zero",))
        >>> gather = lambda w: jax.lax.all_gather(w, "zero", tiled=True)
        >>> step = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=P("zero"), out_specs=P(), check_vma=False))
        >>> compiled = step.lower(jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)).compile()
        >>> collectives(compiled, mesh)
        n  kind        dtype  operands    MiB  axes  group  loops  branch  MiB/run
        1  all-gather  bf16          1  1.000  zero      8  -      -         1.000
        1 launches, 1 operands, 1.000 MiB per run
    """
    module, shape = read_hlo(compiled), None if mesh is None else tuple(mesh.shape.items())
    if mesh is not None and mesh.size != module.devices:
        raise ConfigError(f"mesh has {mesh.size} devices, but the program was compiled for {module.devices}")
    found = (executed for executed in module.walk() if is_collective(executed.op))
    return Collectives(row for executed in found for row in _rows(executed, module.devices, shape))


def distinct(found: Collectives) -> dict[Collective, int]:
    """Count the rows that differ only in op_name."""
    return Counter(replace(row, op_name="") for row in found)


def loops_text(row: Collective) -> str:
    return " x ".join("?" if trips is None else str(trips) for trips in row.loops) or "-"


def is_collective(op: Instruction) -> bool:
    """Return whether an instruction is a collective, or the start of one: it has the operands, and counts."""
    return op.opcode.removesuffix("-start") in KINDS


def _rows(executed: Executed, devices: int, mesh_shape: MeshShape) -> list[Collective]:
    """Make the rows of one collective, one per dtype."""
    op, kind = executed.op, executed.op.opcode.removesuffix("-start")
    arrays = [array for name in op.operands for array in executed.scope[name].arrays]
    text, pairs = group_text(op)
    axes, size = _group_axes(text, pairs, devices, mesh_shape)
    parts = 1
    if kind == "all-to-all" and "dimensions=" not in op.attributes:
        parts = size  # the tuple form has one operand per peer
    elif kind == "ragged-all-to-all":
        # The rows and their buffer; the smaller one holds the most that others may send. The rest are offsets.
        arrays = [min(arrays[:2], key=lambda array: array.bytes)]
    total, count = Counter[str](), Counter(array.dtype for array in arrays)
    for array in arrays:
        total[array.dtype] += array.bytes * (size if kind == "all-gather" else 1)
    return [
        Collective(
            kind, dtype, count[dtype] // parts, total[dtype], axes, size, executed.loops, executed.in_branch, op.op_name
        )
        for dtype in count
    ]


@functools.lru_cache(maxsize=4096)
def _group_axes(text: str, pairs: bool, devices: int, mesh_shape: MeshShape) -> tuple[tuple[str, ...] | None, int]:
    """Return (mesh axes that vary inside a group, devices per group) of replica groups or source-target pairs."""
    members = groups(text, devices)
    size = longest_chain(members) if pairs else max(map(len, members))
    if mesh_shape is None:
        return None, size
    varies = np.zeros(len(mesh_shape), bool)
    for group in members:
        coordinates = np.array(np.unravel_index(np.array(group), [size for _, size in mesh_shape]))
        varies |= (coordinates != coordinates[:, :1]).any(1)
    return tuple(name for (name, _), varying in zip(mesh_shape, varies, strict=True) if varying), size


class CollectiveCosts:
    """The costs of a module's collectives.

    A ring sends the same bytes over each of its links. Inside a host each GPU sends at `rates.gather` or `.scatter`. A
    group of g GPUs on each of several hosts has one ring through each GPU's network card, so that a GPU sends at the
    slower of its NVLink's rate and g times `rates.hosts`: the bus bandwidth of nccl-tests' PERFORMANCE.md, which
    makes a gather or scatter of S bytes among n GPUs take S (n-1)/n / bandwidth, an all-reduce twice. Latency grows
    by a hop per GPU of a ring, and with the logarithm of the hosts for an all-reduce, which takes a tree.
    """

    def __init__(self, module: HloModule, rates: Rates, mesh: jax.sharding.Mesh | None, gpus_per_node: int):
        if mesh is not None and mesh.size != module.devices:
            raise ConfigError(f"mesh has {mesh.size} devices, but the program was compiled for {module.devices}")
        self.module, self.rates = module, rates
        ids = range(module.devices) if mesh is None else [d.id for d in mesh.devices.flat]
        self.host = [i // gpus_per_node for i in ids]

    def cost(self, op: Instruction, scope: Computation) -> Cost:
        """Price one collective; the bytes are those that a GPU sends.

        Raises:
            UnreadableProgram: its groups have a spelling that this reader does not know.
        """
        kind = op.opcode.removesuffix("-start")
        sizes = [scope[name].bytes for name in op.operands]
        size = min(sizes[:2]) if kind == "ragged-all-to-all" else sum(sizes)
        text, pairs = group_text(op)
        try:
            members = groups(text, self.module.devices)
        except ValueError as error:
            raise UnreadableProgram(op, str(error)) from error
        rates = self.rates
        if pairs:
            crosses = any(self.host[source] != self.host[target] for source, target in members)
            rate = min(rates.permute, rates.hosts) if crosses else rates.permute
            return Cost(kind, rates.latency + size / rate, bytes=size)
        n = max(map(len, members))
        if n == 1:
            return Cost(kind, rates.latency)
        group = max(members, key=lambda group: (len({self.host[i] for i in group}), len(group)))
        hosts = len({self.host[i] for i in group})
        each = math.ceil(n / hosts)
        if kind in ("all-to-all", "ragged-all-to-all"):
            # Pairwise messages: those to other hosts go through the GPU's own network card, at the same time.
            here = size * (each - 1) / n / at_most(rates.gather, each)
            there = size * (n - each) / n / rates.hosts if hosts > 1 else 0.0
            return Cost(kind, rates.latency + max(here, there), bytes=size * (n - 1) / n)
        factor = {"all-gather": n - 1.0, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
        table = rates.gather if kind in ("all-gather", "collective-broadcast") else rates.scatter
        inside = at_most(table, each) if each > 1 else math.inf
        rate = inside if hosts == 1 else min(inside, each * rates.hosts)
        tree = 2 * ((n / hosts - 1) * _TREE[0] + math.log2(hosts) * _TREE[1])
        hops = tree if kind == "all-reduce" else (n - hosts) * _RING[0] + (hosts - 1) * _RING[1]
        latency = rates.latency + (hops if hosts > 1 else 0.0)  # inside a host it is measured with its hops
        return Cost(kind, latency + factor * size / rate, bytes=factor * size)
