"""Lists every collective of a compiled program, read from its optimized HLO.

The optimized HLO is the program that runs, after XLA has combined, split, hoisted or made asynchronous the collectives
of the source. The reader walks the call graph from the entry: bodies of ``while`` loops (with their trip counts),
branches of conditionals, calls, fusions and asynchronous wrappers. A computation that is reached twice counts twice.

Each line of a computation is one instruction: ``%name = type opcode(%operand, ...), attribute=value, ...``. Operands
may be printed without types, so their shapes are looked up by name in the same computation.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np

from jzero.errors import ConfigError
from jzero.planner.hlo import BITS, Computation, Instruction, Module, read
from jzero.planner.replica_groups import group_text, groups, longest_chain

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)


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


@dataclass(frozen=True, repr=False)
class Collectives:
    """The collectives of one program. Iterate over it, ``select`` from it, print it.

    The totals count a collective in a branch as if it always executed; ``select(in_branch=False)`` excludes it.
    """

    rows: tuple[Collective, ...]

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Collective:
        return self.rows[index]

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
        """Whether a collective is in a loop of unknown trip count; the totals are lower bounds then."""
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
        wanted = None if axes is None else {axes} if isinstance(axes, str) else set(axes)
        return Collectives(
            tuple(
                row
                for row in self
                if (kind is None or row.kind == kind)
                and (dtype is None or row.dtype == dtype)
                and (wanted is None or set(row.axes or ()) == wanted)
                and (loops is None or row.loops == loops)
                and (in_loop is None or bool(row.loops) == in_loop)
                and (in_branch is None or row.in_branch == in_branch)
                and (op_name is None or op_name in row.op_name)
            )
        )

    def __repr__(self) -> str:
        """Format a plain table; rows that differ only in op_name share a line that starts with their number."""
        lines = [["n", "kind", "dtype", "operands", "MiB", "axes", "group", "loops", "branch", "MiB/run"]]
        for row, n in Counter(replace(row, op_name="") for row in self).items():
            axes = "?" if row.axes is None else ",".join(row.axes) or "-"
            loops = " x ".join("?" if trips is None else str(trips) for trips in row.loops) or "-"
            sizes = f"{row.bytes / 2**20:.3f}", f"{n * row.bytes * row.times / 2**20:.3f}"
            branch = "yes" if row.in_branch else "-"
            line = (n, row.kind, row.dtype, row.operands, sizes[0], axes, row.group_size, loops, branch, sizes[1])
            lines.append([str(cell) for cell in line])
        columns = []
        for title, *cells in zip(*lines, strict=True):
            width = max(map(len, (title, *cells)))
            pad = str.rjust if title in ("n", "operands", "MiB", "group", "MiB/run") else str.ljust
            columns.append([pad(cell, width) for cell in (title, *cells)])
        table = ["  ".join(line) for line in zip(*columns, strict=True)]
        flag = "; some trip counts unknown, taken as 1" if self.unknown_trips else ""
        total = f"{self.launches} launches, {self.operands} operands, {self.bytes / 2**20:.3f} MiB per run{flag}"
        return "\n".join([line.rstrip() for line in table] + [total])


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
    return Collectives(_Walk(read(compiled), mesh).rows())


class _Walk:
    """A walk through the computations that a module executes."""

    def __init__(self, module: Module, mesh: jax.sharding.Mesh | None):
        self.module = module
        self.mesh_shape = None if mesh is None else tuple(mesh.shape.items())
        if mesh is not None and mesh.size != module.devices:
            raise ConfigError(f"mesh has {mesh.size} devices, but the program was compiled for {module.devices}")
        self._rows: dict[str, tuple[Collective, ...]] = {}

    def rows(self, computation: str = "") -> tuple[Collective, ...]:
        """Return the collectives that ``computation`` (default: the entry) executes, with the loops inside it.

        Cached by computation, because several instructions may call the same one.
        """
        name = computation or self.module.entry
        if name not in self._rows:
            found: list[Collective] = []
            for instruction in self.module.computations[name].values():
                # The -start half of an asynchronous pair has the operands and counts; the other halves do not.
                if instruction.opcode.endswith(("-done", "-update")):
                    continue
                if instruction.opcode.removesuffix("-start") in KINDS:
                    found += self._collective(instruction, self.module.computations[name])
                else:
                    found += self._called(instruction)
            self._rows[name] = tuple(found)
        return self._rows[name]

    def _called(self, instruction: Instruction) -> Iterator[Collective]:
        """Yield the collectives of the computations that an instruction executes."""
        loop = (instruction.trips,) if instruction.opcode == "while" else ()
        branch = instruction.opcode == "conditional"
        for name in instruction.called():
            for row in self.rows(name):
                yield replace(row, loops=loop + row.loops, in_branch=branch or row.in_branch)

    def _collective(self, instruction: Instruction, scope: Computation) -> list[Collective]:
        """Make the rows of one collective, one per dtype."""
        kind = instruction.opcode.removesuffix("-start")
        arrays = [array for name in instruction.operands for array in scope[name].arrays]
        text, pairs = group_text(instruction)
        axes, size = _group_axes(text, pairs, self.module.devices, self.mesh_shape)
        parts = 1
        if kind == "all-to-all" and "dimensions=" not in instruction.attributes:
            parts = size  # the tuple form has one operand per peer
        elif kind == "ragged-all-to-all":
            # The rows and their buffer; the smaller one holds the most that others may send. The rest are offsets.
            arrays = [min(arrays[:2], key=lambda array: array.bytes)]
        total = Counter[str]()
        for array in arrays:
            total[array.dtype] += array.bytes * (size if kind == "all-gather" else 1)
        count = Counter(array.dtype for array in arrays)
        row = Collective(kind, "", 0, 0, axes, size, op_name=instruction.op_name)
        return [replace(row, dtype=dtype, operands=count[dtype] // parts, bytes=total[dtype]) for dtype in count]


@functools.lru_cache(maxsize=4096)
def _group_axes(
    text: str, pairs: bool, devices: int, mesh_shape: tuple[tuple[str, int], ...] | None
) -> tuple[tuple[str, ...] | None, int]:
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
