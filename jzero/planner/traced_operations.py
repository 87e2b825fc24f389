"""The matmuls and collectives of a traced step: what runs in float32, and what moves between devices that act as one.

Each has the scopes of its operation (`jax.named_scope`), by which `jzero.profiling.flops` adds up modules, and the line
of the model. `jzero.spread` runs a model on shards with collectives of its own, so that the trace has them all, forward
and backward, before anything is compiled. XLA may combine some, or remove what is computed twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset

from jzero._compat import without_dead_code
from jzero.display.text_table import size_text
from jzero.kernels.trace import Equation
from jzero.mesh import GROUP_AXES, present
from jzero.moe.expert_layer import OCCUPIED
from jzero.passes.gradients import COUNT, REDUCE
from jzero.spread.matmuls import WHOLE_FACTOR
from jzero.spread.rules import WHOLE_ARRAYS, WHOLE_BACKWARD
from jzero.step.update import SCOPE as UPDATE
from jzero.tiling import CUT
from jzero.tracing.auto_cast import SCOPE as AUTO_CAST
from jzero.tracing.equations import UNREAD, TracedOperation, operations
from jzero.tracing.source_lines import source_line

_HALF = (
    DotAlgorithmPreset.F16_F16_F16,
    DotAlgorithmPreset.F16_F16_F32,
    DotAlgorithmPreset.BF16_BF16_BF16,
    DotAlgorithmPreset.BF16_BF16_F32,
)
UNNAMED = re.compile(rf"rematted_computation|checkpoint|{OCCUPIED}\d+")

FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER = "forward", "backward", "recomputed", "optimizer"


# Kernels of attention -> their products: (of their part, recomputed). The backward pass computes the scores again, and
# then the gradients of scores, queries, keys and values.
_ATTENTION = {
    "dot_product_attention_fwd_wrapper": (2, 0),
    "dot_product_attention_bwd_wrapper": (4, 1),
    "flash_mha_fwd_hlo": (2, 0),
    "flash_mha_bwd_hlo": (4, 1),
}
_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class Matmul:
    """One dot_general or convolution of a program, or one fused attention.

    Attributes:
      where: the line of the model, "Net.__call__ (net.py:12)".
      wide: whether it runs in float32, because an operand is float32. A product of half-precision operands whose sum
        is float32 is not.
      times: how often it runs in one call of the program, on each device.
      flops, bytes: of all these times; bytes are the operands' and the result's. In a condition, the mean over its
        branches: the stages of a pipeline of unequal layers take one each.
      scopes: the names around it, outermost first: ("stack", "attention", "qkv").
      part: FORWARD, BACKWARD, RECOMPUTED (forward again, in the backward pass), or OPTIMIZER.
      fused: whether it is an attention kernel.
    """

    where: str
    wide: bool
    times: int
    flops: float
    bytes: float = 0.0
    scopes: tuple[str, ...] = ()
    part: str = FORWARD
    fused: bool = False


@dataclass(frozen=True)
class Matmuls:
    """The floating-point matmuls of a program on each device.

    Attributes:
      all: in the program's order.
      cast: the names of the batch's arrays that `auto_cast` casts.

    `str()` lists the lines of the model whose matmuls run in float32.
    """

    all: tuple[Matmul, ...] = field(repr=False)
    cast: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return sum(p.times for p in self.all)

    @property
    def float32(self) -> int:
        """The number that runs in float32."""
        return sum(p.times for p in self.all if p.wide)

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.all)

    @property
    def float32_share(self) -> float:
        """The share of the FLOPs that runs in float32, from 0 to 1."""
        return sum(share for _, share in self.float32_by_line.values())

    @property
    def float32_by_line(self) -> dict[str, tuple[int, float]]:
        """{line of the model: (count, share of the FLOPs)} of the products in float32, the largest share first."""
        found: dict[str, tuple[int, float]] = {}
        total = self.flops or 1.0  # 0: the arrays are empty
        for p in self.all:
            if p.wide:
                count, share = found.get(p.where, (0, 0.0))
                found[p.where] = count + p.times, share + p.flops / total
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def __str__(self) -> str:
        summary = f"{self.float32} of {self.count} matmuls, {self.float32_share:.1%} of the FLOPs, in float32"
        lines = [f"{share:7.1%} {count:6}  {where}" for where, (count, share) in self.float32_by_line.items()]
        return "\n".join([summary, *lines])


def matmuls(traced: jax.stages.Traced) -> Matmuls:
    """Count the matrix products of a traced step, forward, backward and recomputed, each time that they run.

    A loop of unknown length counts as one pass, and every branch of a condition as taken. The optimizer's products are
    left out, because float32 is deliberate there; so are those of fused attention, which has half precision alone.

    Args:
      traced: from `TrainStep.trace(batch_shapes)`, or `jax.jit(f).trace(...)` of any function.
    """
    walk = Walk(traced)
    return Matmuls(tuple(p for p in walk.found if p.part != OPTIMIZER and not p.fused), tuple(walk.cast))


class Walk:
    """The products of a traced program, and what else its operations tell.

    Attributes:
      found: all products, in the program's order.
      cast: the names of the batch's arrays that `auto_cast` casts.
      scopes: those of all operations but the optimizer's.
      unread: {operation: how often it runs} of kernels whose products no trace shows.
      guesses: the operations whose runs are not known: loops of unknown length, conditions with products inside.
    """

    def __init__(self, traced: jax.stages.Traced):
        self.found: list[Matmul] = []
        self.cast: dict[str, None] = {}
        self.scopes: dict[tuple[str, ...], None] = {}
        self.unread = Counter[str]()
        guessed: dict[TracedOperation, None] = {}
        for operation in operations(without_dead_code(traced.jaxpr)):
            eqn, scope, runs = operation.eqn, operation.scope, operation.times * operation.share
            if AUTO_CAST in scope:
                self.cast[scope.partition(AUTO_CAST)[2]] = None
            if operation.name in UNREAD:
                self.unread[operation.name] += operation.times
                continue
            part, names, times = part_of(scope), names_of(scope), operation.times
            if part != OPTIMIZER:
                self.scopes[names] = None
            for flops, which in _work(eqn, part, occupied(scope)):
                fused = operation.name in _ATTENTION
                size = runs * sum(x.aval.size * x.aval.dtype.itemsize for x in (*eqn.invars, *eqn.outvars))
                # XLA computes a product in the widest dtype of the operands, unless told otherwise.
                widest = max(x.aval.dtype.itemsize for x in eqn.invars[:2])
                wide = eqn.params.get("precision") not in _HALF and widest > 2
                self.found.append(Matmul(operation.line, wide, times, runs * flops, size, names, which, fused))
                at = operation.outer
                while at:
                    if at.name in ("cond", "while"):
                        guessed[at] = None
                    at = at.outer
        self.guesses = Counter(operation.name for operation in guessed)


def part_of(scope: str) -> str:
    """Tell the part of the step from the scopes: transposes are the backward pass, and jax.checkpoint names its own."""
    if UPDATE in scope:
        return OPTIMIZER
    again, back = scope.rfind("rematted_computation"), scope.rfind("transpose(")
    return RECOMPUTED if again > back else BACKWARD if back >= 0 else FORWARD


def occupied(scope: str) -> float:
    """Return the share of the rows of a grouped product that are not padding, on average."""
    found = re.search(rf"{OCCUPIED}(\d+)", scope)
    return 1 / int(found[1]) if found else 1.0


def names_of(scope: str) -> tuple[str, ...]:
    """Return the names that someone gave: no transformations ("jvp("), no subscripts of einsum, nothing of JAX's own.

    >>> names_of("/transpose(jvp(stack))/attention/vmap(BTNH,BSNH->BNTS)")
    ('stack', 'attention')
    """
    names = re.sub(r"\w+\(", "", scope).replace(")", "").split("/")
    return tuple(n for n in names if re.fullmatch(r"\w[\w.\-]*", n) and not UNNAMED.fullmatch(n))


def _work(eqn: Equation, part: str, rows: float) -> Iterator[tuple[float, str]]:
    """Yield (FLOPs, part) of an operation that is a product of floats; `rows`: the share that a grouped one has."""
    name = eqn.primitive.name
    if name in _PRODUCTS and all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars[:2]):
        yield _flops(eqn) * (rows if name == "ragged_dot_general" else 1.0), part
    elif name in _ATTENTION:
        forward, again = _ATTENTION[name]
        yield forward * _attention_flops(eqn), part
        if again:
            yield again * _attention_flops(eqn), RECOMPUTED


def _flops(eqn: Equation) -> float:
    """Count the FLOPs of a product; of a convolution padding too, but not the zeros of a strided one's gradient."""
    lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
    if eqn.primitive.name == "conv_general_dilated":
        outputs = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        each = prod(rhs) / outputs / prod(eqn.params["lhs_dilation"])
        return 2.0 * prod(eqn.outvars[0].aval.shape) * each
    grouped = eqn.params.get("ragged_dot_dimension_numbers")
    (_, contracted), (_, batch) = grouped.dot_dimension_numbers if grouped else eqn.params["dimension_numbers"]
    not_free = {*contracted, *batch, *(grouped.rhs_group_dimensions if grouped else ())}
    return 2.0 * prod(lhs) * prod(size for i, size in enumerate(rhs) if i not in not_free)


def _attention_flops(eqn: Equation) -> float:
    """Count one of the products of fused attention: of the pairs of query and key that its causal mask leaves.

    It skips whole blocks that are masked and computes those on the diagonal whole, a little more than is counted. Other
    masks (padding, segments) skip nothing that a trace can know.
    """
    (B, T, N, C), S = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape[1]
    if eqn.params.get("layout"):  # BNTH
        N, T, S = T, N, eqn.invars[1].aval.shape[2]
    pairs, window = T * S, eqn.params.get("sliding_window_length")
    if eqn.primitive.name.startswith("flash_mha") or "CAUSAL" in eqn.params["mask_type"].name:
        rows = np.arange(T)
        pairs = int(np.minimum(np.minimum(rows + 1, S), window or S).sum())
    return 2.0 * B * N * C * pairs


# ---------------------------------------------------------------- collectives

MOVE_COLUMNS = ["collective", "axes", "bytes", "times", "bytes a step", "pass", "in", "line"]
MOVE_WORDS = ["collective", "axes", "pass", "in", "line"]  # those with text
_KINDS = {
    "psum": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}  # fmt: skip


@dataclass(frozen=True)
class TracedCollective:
    """A collective of a step, on each device.

    Attributes:
      kind: as in compiled programs, such as "all-gather".
      axes: of the mesh.
      bytes: the larger one of what a device puts in and gets out.
      part: of the step: "forward", "backward", "recomputed".
      scope: the module, such as "stack/attention/out"; "reduce_gradients" for what is summed once a step.
      line: of the model, such as "llama.py:159"; empty if it is jzero's own.
      times: how often it runs in a step.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    part: str
    scope: str
    line: str
    times: int = 1

    @property
    def total(self) -> int:
        return self.bytes * self.times


@dataclass(frozen=True)
class TracedCollectives:
    """The collectives of a traced step over axes of the mesh.

    Attributes:
      all: those that differ, the largest total first.
      whole: the primitives that ran on whole arrays although their operands were divided, as "sort (model.py:12)".
      marked: pairs of a scope and an all-gather of the forward pass in it: `WHOLE_FACTOR`, or that of a cut in tiles.
    """

    all: tuple[TracedCollective, ...] = ()
    whole: tuple[str, ...] = ()
    marked: tuple[tuple[str, TracedCollective], ...] = ()

    def rows(self, most: int | None = None) -> list[list[str]]:
        """Return rows of `MOVE_COLUMNS`: the `most` largest collectives, and one that sums up the others."""
        rows = [
            [m.kind, ", ".join(m.axes), size_text(m.bytes), str(m.times), size_text(m.total), m.part, m.scope, m.line]
            for m in self.all[:most]
        ]
        if rest := self.all[len(rows) :]:
            times, size = sum(m.times for m in rest), size_text(sum(m.total for m in rest))
            rows.append([f"{len(rest)} smaller", "", "", str(times), size, "", "", ""])
        return rows


def moves(traced: jax.stages.Traced, mesh: jax.sharding.Mesh) -> TracedCollectives:
    """List what a traced step moves over the axes of the mesh whose devices act as one; nothing if there are none.

    Args:
      traced: from `TrainStep.trace(batch_shapes)`.
      mesh: the step's.
    """
    axes = present(mesh, *GROUP_AXES)
    if not axes:
        return TracedCollectives()
    times, whole, marked = Counter[TracedCollective](), Counter[str](), Counter[tuple[str, TracedCollective]]()
    for operation in operations(without_dead_code(traced.jaxpr)):
        eqn, runs, scope = operation.eqn, operation.times, operation.scope
        own = str(eqn.source_info.name_stack)
        part, line = BACKWARD if REDUCE in scope else part_of(scope), source_line(eqn)
        named = eqn.params.get("axes", eqn.params.get("axis_name")) if operation.name in _KINDS else ()
        over = named if isinstance(named, tuple) else (named,)
        if set(axes) & set(over) and part != OPTIMIZER:
            move = TracedCollective(_KINDS[operation.name], over, _bytes(eqn), part, _module(scope), line)
            times[move] += runs
            if (move.kind, part) == ("all-gather", FORWARD) and (marks := [*filter(_is_mark, names_of(scope))]):
                marked[marks[-1], move] += runs
        # The transpose of a primitive that ran on whole arrays needs no line of its own.
        elif not over and (WHOLE_BACKWARD in own or (WHOLE_ARRAYS in own and part == FORWARD)):
            whole[f"{eqn.primitive.name} ({line})"] += 1
    found = (replace(move, times=runs) for move, runs in times.items())
    with_marks = ((mark, replace(move, times=runs)) for (mark, move), runs in marked.items())
    return TracedCollectives(tuple(sorted(found, key=lambda move: -move.total)), tuple(whole), tuple(with_marks))


def _is_mark(name: str) -> bool:
    return name == WHOLE_FACTOR or name.startswith(CUT)


def _bytes(eqn: Equation) -> int:
    sizes = [[prod(v.aval.shape) * v.aval.dtype.itemsize for v in side] for side in (eqn.invars, eqn.outvars)]
    # Of rows and their buffer one holds the most that others may send.
    return min(sizes[0][:2]) if eqn.primitive.name == "ragged_all_to_all" else max(map(sum, sizes))


def _module(scope: str) -> str:
    names = [name for name in names_of(scope) if name not in (WHOLE_ARRAYS, WHOLE_BACKWARD) and not _is_mark(name)]
    return next((name for name in (REDUCE, COUNT) if name in names), "/".join(names))
