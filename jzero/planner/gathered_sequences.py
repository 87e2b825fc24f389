"""Warnings of sequences that are gathered where they could stay divided: for attention, or for uneven tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from jax.sharding import Mesh

from jzero.errors import some_of
from jzero.mesh import CONTEXT, TENSOR, degrees_text, present
from jzero.planner.moves import Move, Moves
from jzero.spread.products import WHOLE_FACTOR
from jzero.tiling import CUT
from jzero.values.kinds import either
from jzero.values.sizes import size_text


def gathered_sequences(found: Moves, mesh: Mesh, attention: str = "auto") -> Iterator[str]:
    """Warn of attention that gathers sequences over `context`, and of tiles that the axes do not divide."""
    if factors := [move for mark, move in found.marked if mark == WHOLE_FACTOR and CONTEXT in move.axes]:
        yield (
            f"XLA's own attention at {_lines(factors)} gathers queries or keys over context, {_price(factors)}; fix: "
            "jzero.attention in bf16 or fp16 on GPUs, where it takes cuDNN's kernel and leaves sequences divided"
            + (f'; context_parallel.attention = "{attention}" changes that kernel alone' if attention != "auto" else "")
        )
    for cut in sorted({mark for mark, _ in found.marked if mark.startswith(CUT)}):
        yield _uneven(cut, [move for mark, move in found.marked if mark == cut], mesh)


def _uneven(cut: str, moved: Sequence[Move], mesh: Mesh) -> str:
    tiles, length = map(int, cut.removeprefix(CUT).split("_of_"))
    axes = present(mesh, CONTEXT, TENSOR)
    parts = prod(mesh.shape[axis] for axis in axes)
    fitting = [n for n in range(1, length + 1) if length % (n * parts) == 0]
    near = sorted(sorted(fitting, key=lambda n: abs(n - tiles))[:3])
    fix = f"{either(near)} tiles" if near else f"a length that is a multiple of {parts}"
    return (
        f"{tiles} tiles of the sequence of {length} at {_lines(moved)}: {degrees_text(mesh, axes)} do not divide a "
        f"tile of {length // tiles}, so the sequence is gathered, {_price(moved)}; fix: {fix}"
    )


def _lines(moved: Sequence[Move]) -> str:
    return some_of(dict.fromkeys(move.line or "an unknown line" for move in moved), 3)


def _price(moved: Sequence[Move]) -> str:
    return f"{size_text(sum(move.total for move in moved))} a step on each device, and again in the backward pass"
