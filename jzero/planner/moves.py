"""What a traced step moves between the devices that act as one, by axis and line of the model.

`jzero.spread` runs a model on shards with collectives of its own, so that the trace has them all, forward and backward,
before anything is compiled. XLA may combine some, or remove what is computed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compat import inner_jaxprs, without_dead_code
from jzero.gradients import COUNT, REDUCE
from jzero.mesh import CONTEXT, GROUP_AXES, TENSOR, degrees_text, present, spans_hosts
from jzero.model import ENDS, Inputs, StackModel, stack_functions
from jzero.planner.products import BACKWARD, FORWARD, OPTIMIZER, names_of, part_of
from jzero.spread.products import WHOLE_FACTOR
from jzero.spread.rules import WHOLE_ARRAYS, WHOLE_BACKWARD
from jzero.tiling import CUT
from jzero.tracing.source_lines import source_line
from jzero.tree import PyTree
from jzero.values.sizes import size_text

COLUMNS = ["collective", "axes", "bytes", "times", "bytes a step", "pass", "in", "line"]
WORDS = ["collective", "axes", "pass", "in", "line"]  # those with text
_KINDS = {
    "psum": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}  # fmt: skip


@dataclass(frozen=True)
class Move:
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
        """Its bytes in a step."""
        return self.bytes * self.times


@dataclass(frozen=True)
class Moves:
    """The collectives of a traced step over axes of the mesh.

    Attributes:
      all: those that differ, the largest total first.
      whole: the primitives that ran on whole arrays although their operands were divided, as "sort (model.py:12)".
      marked: pairs of a scope and an all-gather of the forward pass in it: `WHOLE_FACTOR`, or that of a cut in tiles.
    """

    all: tuple[Move, ...] = ()
    whole: tuple[str, ...] = ()
    marked: tuple[tuple[str, Move], ...] = ()

    @property
    def total(self) -> int:
        """The bytes of a step."""
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


def moves(traced: jax.stages.Traced, mesh: jax.sharding.Mesh) -> Moves:
    """List what a traced step moves over the axes of the mesh whose devices act as one; nothing if there are none.

    Args:
      traced: from `TrainStep.trace(batch_shapes)`.
      mesh: the step's.
    """
    axes = present(mesh, *GROUP_AXES)
    return moves_over(without_dead_code(traced.jaxpr), axes) if axes else Moves()


def across_hosts(found: Moves, mesh: jax.sharding.Mesh) -> Iterator[str]:
    """Warn where devices of several hosts act as one."""
    if axes := [axis for axis in present(mesh, *GROUP_AXES) if spans_hosts(mesh, axis)]:
        asked, size = degrees_text(mesh, axes), sum(move.total for move in found.all if set(axes) & set(move.axes))
        yield (
            f"{asked}: devices of several hosts act as one, and move {size_text(size)} a step, each, at the speed of "
            "the network; fix: degrees of expert, context and tensor whose product divides the number of GPUs of a host"
        )


def whole_sequences(model: Any, weights: PyTree, traced: jax.stages.Traced, mesh: jax.sharding.Mesh) -> Iterator[str]:
    """Warn where an axis does not divide the sequence: of the batch, or between the layers of a stack.

    Args:
      weights: shapes.
      traced: the step, which knows the shapes of the batch.
    """
    axes, (_, *inputs) = present(mesh, CONTEXT, TENSOR), traced.args_info[0]
    batch, extra = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs[:2])
    if not isinstance(model, StackModel):
        yield from _whole_tokens(batch, mesh.shape[CONTEXT])
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
                    "layers: its devices hold it, and compute norms and residuals, all alike; fix: a length that is a "
                    f"multiple of {divided * mesh.shape[axis]}"
                )
            else:
                divided *= mesh.shape[axis]


def _whole_tokens(batch: PyTree, degree: int) -> Iterator[str]:
    """Warn of tokens [rows, sequence] that `context` does not divide."""
    tokens = [x for x in jax.tree.leaves(batch) if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer)]
    for length in sorted({x.shape[1] for x in tokens if x.shape[1] % degree}):
        yield (
            f"mesh.{CONTEXT} = {degree} does not divide the sequence of {length}: its devices all compute the whole of "
            f"it; fix: a length that is a multiple of {degree}"
        )


def moves_over(jaxpr: Any, axes: Sequence[str]) -> Moves:
    """List the collectives of a jaxpr over at least one of these axes, and what ran on whole arrays."""
    times, whole, marked = Counter[Move](), Counter[str](), Counter[tuple[str, Move]]()
    for eqn, runs, scope in _operations(jaxpr, 1, ""):
        part, line, over = BACKWARD if REDUCE in scope else part_of(scope), source_line(eqn), _axes(eqn)
        if set(axes) & set(over) and part != OPTIMIZER:
            move = Move(_KINDS[eqn.primitive.name], over, _bytes(eqn), part, _module(scope), line)
            times[move] += runs
            if (move.kind, part) == ("all-gather", FORWARD) and (marks := [*filter(_is_mark, names_of(scope))]):
                marked[marks[-1], move] += runs
        elif not over and _on_whole_arrays(str(eqn.source_info.name_stack).split("/"), part):
            whole[f"{eqn.primitive.name} ({line})"] += 1
    found = (replace(move, times=runs) for move, runs in times.items())
    with_marks = ((mark, replace(move, times=runs)) for (mark, move), runs in marked.items())
    return Moves(tuple(sorted(found, key=lambda move: -move.total)), tuple(whole), tuple(with_marks))


def _is_mark(name: str) -> bool:
    return name == WHOLE_FACTOR or name.startswith(CUT)


def _on_whole_arrays(names: Sequence[str], part: str) -> bool:
    """Tell a primitive that ran on whole arrays from the transpose of one, which needs no line of its own."""
    return any(WHOLE_BACKWARD in name or (WHOLE_ARRAYS in name and part == FORWARD) for name in names)


def _operations(jaxpr: Any, times: int, outside: str) -> Iterator[tuple[Any, int, str]]:
    """Yield (operation, how often it runs, its scopes); a loop of unknown length counts as one pass."""
    for eqn in jaxpr.eqns:
        scope = f"{outside}/{eqn.source_info.name_stack}"
        yield eqn, times, scope
        for body in inner_jaxprs(eqn):
            yield from _operations(body, times * eqn.params.get("length", 1), scope)


def _axes(eqn: Any) -> tuple[str, ...]:
    if eqn.primitive.name not in _KINDS:
        return ()
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def _bytes(eqn: Any) -> int:
    sizes = [[prod(v.aval.shape) * v.aval.dtype.itemsize for v in side] for side in (eqn.invars, eqn.outvars)]
    # Of rows and their buffer one holds the most that others may send.
    return min(sizes[0][:2]) if eqn.primitive.name == "ragged_all_to_all" else max(map(sum, sizes))


def _module(scope: str) -> str:
    names = [name for name in names_of(scope) if name not in (WHOLE_ARRAYS, WHOLE_BACKWARD) and not _is_mark(name)]
    return next((name for name in (REDUCE, COUNT) if name in names), "/".join(names))
