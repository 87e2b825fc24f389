"""Lists what a traced step moves between the devices that act as one, by axis and line of the model.

`jzero.spread` runs a model on shards with collectives of its own, so that the trace has them all, forward and backward,
before anything is compiled. XLA may combine some, or remove what is computed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp

from jzero._compat import without_dead_code
from jzero.display.text_table import size_text
from jzero.kernels.trace import Equation
from jzero.mesh import CONTEXT, GROUP_AXES, TENSOR, degrees_text, present, spans_hosts
from jzero.model import ENDS, Inputs, Model, StackModel, stack_functions
from jzero.passes.gradients import COUNT, REDUCE
from jzero.planner.traced_matmuls import BACKWARD, FORWARD, OPTIMIZER, names_of, part_of
from jzero.spread.matmuls import WHOLE_FACTOR
from jzero.spread.rules import WHOLE_ARRAYS, WHOLE_BACKWARD
from jzero.tiling import CUT
from jzero.tracing.equations import operations
from jzero.tracing.source_lines import source_line
from jzero.tree import PyTree

COLUMNS = ["collective", "axes", "bytes", "times", "bytes a step", "pass", "in", "line"]
WORDS = ["collective", "axes", "pass", "in", "line"]  # those with text
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

    @property
    def total(self) -> int:
        return sum(move.total for move in self.all)

    def rows(self, most: int | None = None) -> list[list[str]]:
        """Return the cells of a table with `COLUMNS`: the `most` largest collectives, and a row that sums up others."""
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
        part, line, over = BACKWARD if REDUCE in scope else part_of(scope), source_line(eqn), _axes(eqn)
        if set(axes) & set(over) and part != OPTIMIZER:
            move = TracedCollective(_KINDS[eqn.primitive.name], over, _bytes(eqn), part, _module(scope), line)
            times[move] += runs
            if (move.kind, part) == ("all-gather", FORWARD) and (marks := [*filter(_is_mark, names_of(scope))]):
                marked[marks[-1], move] += runs
        # The transpose of a primitive that ran on whole arrays needs no line of its own.
        elif not over and (WHOLE_BACKWARD in own or (WHOLE_ARRAYS in own and part == FORWARD)):
            whole[f"{eqn.primitive.name} ({line})"] += 1
    found = (replace(move, times=runs) for move, runs in times.items())
    with_marks = ((mark, replace(move, times=runs)) for (mark, move), runs in marked.items())
    return TracedCollectives(tuple(sorted(found, key=lambda move: -move.total)), tuple(whole), tuple(with_marks))


def across_hosts(found: TracedCollectives, mesh: jax.sharding.Mesh) -> Iterator[str]:
    """Warn where devices of several hosts act as one."""
    if axes := [axis for axis in present(mesh, *GROUP_AXES) if spans_hosts(mesh, axis)]:
        asked, size = degrees_text(mesh, axes), sum(move.total for move in found.all if set(axes) & set(move.axes))
        yield (
            f"{asked}: devices of several hosts act as one; each moves {size_text(size)} per step at the speed of "
            "the network; fix: degrees of expert, context and tensor whose product divides the number of GPUs of a host"
        )


def whole_sequences(model: Model, weights: PyTree, traced: jax.stages.Traced, mesh: jax.sharding.Mesh) -> Iterator[str]:
    """Warn where an axis does not divide the sequence: of the batch, or between the layers of a stack.

    Args:
      weights: shapes.
      traced: the step, which knows the shapes of the batch.
    """
    axes, (_, *inputs) = present(mesh, CONTEXT, TENSOR), traced.args_info[0]
    (batch, *_), extra = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs[:2])
    if not isinstance(model, StackModel):
        degree = mesh.shape[CONTEXT]
        tokens = [x for x in jax.tree.leaves(batch) if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer)]
        for length in sorted({x.shape[1] for x in tokens if x.shape[1] % degree}):
            yield (
                f"mesh.{CONTEXT} = {degree} does not divide the sequence of {length}: every device computes the "
                f"whole of it; fix: a length that is a multiple of {degree}"
            )
    if not axes or not isinstance(model, StackModel):
        return
    prefix = stack_functions(model)[0]
    x = jax.eval_shape(
        lambda ends, batch, extra: prefix(ends, Inputs(batch, extra), None)[0], weights[ENDS], batch, extra
    )
    for length in sorted({leaf.shape[1] for leaf in jax.tree.leaves(x) if leaf.ndim > 2}):
        divided = 1
        for axis in axes:
            if length % (divided * mesh.shape[axis]):
                yield (
                    f"mesh.{axis} = {mesh.shape[axis]} does not divide the sequence of {length // divided} between "
                    "layers: every device repeats the norms and residuals; fix: a length that is a "
                    f"multiple of {divided * mesh.shape[axis]}"
                )
            else:
                divided *= mesh.shape[axis]


def _is_mark(name: str) -> bool:
    return name == WHOLE_FACTOR or name.startswith(CUT)


def _axes(eqn: Equation) -> tuple[str, ...]:
    if eqn.primitive.name not in _KINDS:
        return ()
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def _bytes(eqn: Equation) -> int:
    sizes = [[prod(v.aval.shape) * v.aval.dtype.itemsize for v in side] for side in (eqn.invars, eqn.outvars)]
    # Of rows and their buffer one holds the most that others may send.
    return min(sizes[0][:2]) if eqn.primitive.name == "ragged_all_to_all" else max(map(sum, sizes))


def _module(scope: str) -> str:
    names = [name for name in names_of(scope) if name not in (WHOLE_ARRAYS, WHOLE_BACKWARD) and not _is_mark(name)]
    return next((name for name in (REDUCE, COUNT) if name in names), "/".join(names))
