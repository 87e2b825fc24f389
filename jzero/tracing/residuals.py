"""Chooses what a backward pass keeps: the fewest bytes from which cheap operations compute everything else it needs.

Automatic differentiation keeps every operand of a derivative, among them results that one pass over memory computes
again: of activation functions, norms, casts. Which ones to keep is a minimum cut of the forward program, as in
PyTorch's min-cut partitioner (`torch._functorch.partitioners`) of compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np

from jzero._compat import has_effect, inner_jaxprs, is_constant
from jzero.kernels.fp8.matmul import NAME as FP8_MATMUL
from jzero.kernels.trace import ATTENTION, Equation, Variable, elementwise_primitives, program_of
from jzero.tracing.equations import Equations

# A part of their operand, or its elements in another shape: nothing is computed.
_VIEWS = frozenset({"expand_dims", "reshape", "slice", "split", "squeeze"})
# XLA computes these where their results are read.
_CHEAP = elementwise_primitives("c") | _VIEWS | {"broadcast_in_dim", "concatenate", "iota", "pad", "rev", "transpose"}
_MATMULS = (FP8_MATMUL, "ragged_dot_general", "conv_general_dilated", *ATTENTION)
_COPY = 31 / 32  # of the bytes of what attention's kernel reads count: with an odd length, it is padded
_MOST = 1 << 28  # the sum of all capacities, which SciPy adds up in int32


def is_cheap(eqn: Equation) -> bool:
    """Return whether an equation is elementwise, or moves elements: XLA computes it where its result is read."""
    if eqn.primitive.name == "jit":
        return all(map(is_cheap, program_of(eqn).jaxpr.eqns))
    return eqn.primitive.name in _CHEAP


def is_matmul(eqn: Equation) -> bool:
    """Return whether an equation is, or contains, a product with weights or fused attention."""
    if eqn.primitive.name == "dot_general":
        return not eqn.params["dimension_numbers"][1][0]  # batched products are attention's
    return eqn.primitive.name in _MATMULS or any(is_matmul(one) for body in inner_jaxprs(eqn) for one in body.eqns)


def fewest_bytes(
    program: Equations,
    wanted: Sequence[Variable],
    free: Iterable[Variable],
    again: Callable[[Equation], bool] = is_cheap,
) -> list[Variable]:
    """Choose variables of a program from which equations that may run again compute all wanted ones.

    What depends on no input always runs again, and XLA finds that it did before. An equation with an effect, such as a
    callback, never does.

    Of equally many bytes those are chosen that need the fewest equations; but the parts of an array that together are
    all of it are kept as that array, since each part would be a copy. What attention's kernel reads is a copy already:
    it is kept even if that takes a few bytes more.

    Args:
      wanted: variables, or constants.
      free: variables that need not be kept.
      again: whether an equation may run again.

    Returns:
      The chosen variables, in the order in which they are computed.
    """
    dependent = program.reached_from(
        [*program.inputs, *(v for eqn in program.eqns if has_effect(eqn) for v in eqn.outvars)]
    )
    free = {*free, *program.constants}

    def costly(variables: Iterable[Variable]) -> list[Variable]:
        return [v for v in variables if not is_constant(v) and v in dependent and v not in free]

    made_from = {
        v: costly(eqn.invars) for eqn in program.eqns if not has_effect(eqn) and again(eqn) for v in eqn.outvars
    }
    needed: dict[Variable, None] = {}  # in a fixed order
    pending = wanted = costly(wanted)
    while pending:
        needed |= dict.fromkeys(pending)
        pending = [u for v in pending for u in made_from.get(v, ()) if u not in needed]
    copies = {v for eqn in program.eqns if eqn.primitive.name in ATTENTION for v in eqn.invars if not is_constant(v)}
    chosen = _cut({v: _bytes(v) * (_COPY if v in copies else 1) for v in needed}, made_from, wanted)
    views = {v: eqn.invars[0] for eqn in program.eqns if eqn.primitive.name in _VIEWS for v in eqn.outvars}
    bases = {v: base for v, base in views.items() if not is_constant(base) and base in needed}
    chosen = _whole_for_parts(chosen - copies, bases) | (chosen & copies)
    return [v for v in [*program.inputs, *(v for eqn in program.eqns for v in eqn.outvars)] if v in chosen]


def _cut(
    sizes: dict[Variable, float], made_from: dict[Variable, list[Variable]], wanted: Sequence[Variable]
) -> set[Variable]:
    """Return the variables of the minimum cut that is nearest to the wanted ones.

    Each variable is an edge from its "made" to its "there" node, whose capacity is its size.
    """
    if not wanted:
        return set()
    from scipy.sparse import csr_array  # 0.15 s, for traces with layers to recompute alone
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    number = {v: i for i, v in enumerate(sizes)}
    source, sink, unlimited = 2 * len(number), 2 * len(number) + 1, 2 * _MOST
    unit = max(sum(sizes.values()) / _MOST, 1)
    edges = {(2 * i, 2 * i + 1): max(round(sizes[v] / unit), 1) for v, i in number.items()}
    for v, i in number.items():
        before = [2 * number[u] + 1 for u in made_from[v]] if v in made_from else [source]
        edges |= {(node, 2 * i): unlimited for node in before}
    edges |= {(2 * number[v] + 1, sink): unlimited for v in wanted}
    rows, columns = zip(*edges, strict=True)
    graph = csr_array((np.array(list(edges.values()), np.int32), (rows, columns)), shape=(sink + 1, sink + 1))
    rest = (graph - maximum_flow(graph, source, sink).flow).T.tocsr()
    rest.eliminate_zeros()
    reaching = set(breadth_first_order(rest, sink, return_predecessors=False).tolist())
    return {v for v, i in number.items() if 2 * i not in reaching and 2 * i + 1 in reaching}


def _whole_for_parts(chosen: set[Variable], views: dict[Variable, Variable]) -> set[Variable]:
    """Replace the chosen parts of an array by the array, where they are all of it; `views`: part -> array."""
    parts: dict[Variable, set[Variable]] = {}
    for v in chosen:
        base = v
        while base in views:
            base = views[base]
        parts.setdefault(base, set()).add(v)
    whole = {base for base, found in parts.items() if sum(map(_bytes, found)) >= _bytes(base)}
    return whole.union(*(found for base, found in parts.items() if base not in whole))


def _bytes(v: Variable) -> int:
    return prod(v.aval.shape) * v.aval.dtype.itemsize
