"""A layer, or several, as a forward and a backward program that run apart: in a pipeline, ticks apart.

`jax.vjp` makes the two, and its residuals wait in a stash between them. Slicing the jaxpr keeps the stash small:

- Of the residuals, and what they are computed from, the fewest bytes are stashed, see `jzero.tracing.residuals`.
- What follows from the parameters alone (a weight, its cast, its gather) or from keys (a dropout mask) need not be
  stashed. The backward pass computes it again.
- The backward pass can be split in two. The gradient of the input runs first, since the stage before waits for it; the
  gradient of the weights runs some ticks later, where the stage would be idle (Qi et al., arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp

from jzero._compat import is_constant, own_source
from jzero.kernels.fp8.matmul import NAME as FP8_MATMUL
from jzero.kernels.trace import Equation
from jzero.tracing.equations import Equations, inlined
from jzero.tracing.fused import fused
from jzero.tracing.residuals import fewest_bytes, is_cheap
from jzero.tracing.slots import Index, run_from_slot, run_into_slot
from jzero.tree import PyTree, combine, partition, replaced

Arrays = list[jax.Array]
# The operations worth delaying: all others cost little, and their operands would have to wait in a buffer.
_PRODUCTS = (FP8_MATMUL, "dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while")


class Chunk:
    """The forward and backward programs of `y, new = f(weights, state, x, context)`, traced for these shapes.

    Args:
      f: `y` has the structure of `x`, and `new` that of `state`.
      operands: weights, state, x and context, any pytrees, whose shapes alone matter. The weights are (diff, nondiff);
        the gradient is taken with respect to `diff`. The state has none, nor have leaves of x that are neither floating
        nor complex. The context is other arguments that do not depend on x: keys, indices.
      split: whether to make `input_backward` and `weight_backward` instead of `backward`.
      keep: whether the backward pass keeps the results of elementwise functions of one array.
      inline: whether what a `jax.jit` in f computes is kept or computed again equation by equation.
      again: (equation, whether it depends on neither x nor state) -> whether the backward pass may run it again.
    """

    def __init__(
        self, f: Callable, operands: tuple[PyTree, PyTree, PyTree, PyTree], *, split: bool = False,
        again: Callable[[Equation, bool], bool] = lambda eqn, constant: constant or is_cheap(eqn), keep: bool = False,
        inline: bool = False,
    ):  # fmt: skip
        weights, state, x, _ = operands
        if not split:  # a kernel cannot be split in two
            f = fused(f, keep=keep)

        def forward(weights: PyTree, state: PyTree, x: PyTree, context: PyTree) -> tuple[PyTree, Arrays]:
            (diff, nondiff), (floats, others) = weights, split_floats(x)

            def differentiable(diff: PyTree, floats: PyTree) -> tuple[PyTree, PyTree]:
                y, new = f((diff, nondiff), state, combine(floats, others), context)
                floats_of_y, others_of_y = split_floats(y)
                return floats_of_y, (others_of_y, new)

            y, pullback, (others, new) = jax.vjp(differentiable, diff, floats, has_aux=True)
            residuals, self.pullback = jax.tree.flatten(pullback)
            return (combine(y, others), new), residuals

        with own_source():
            traced, (y, _) = jax.make_jaxpr(forward, return_shape=True)(*operands)
            if inline:
                traced = jax.make_jaxpr(partial(inlined, traced))(jax.tree.leaves(operands))
        self.program, self.y_tree = Equations(traced), jax.tree.structure(y)
        self.n_y, start = len(jax.tree.leaves(y)), len(jax.tree.leaves(weights))
        stop = start + len(jax.tree.leaves((state, x)))
        self.known = self.program.inputs[:start] + self.program.inputs[stop:]
        self.residuals = self.program.outputs[self.n_y :]
        of_y = zip(self.program.outputs, jax.tree.leaves(y[0]), strict=False)
        self.floats_of_y = [v for v, shape in of_y if jnp.issubdtype(shape.dtype, jnp.inexact)]
        depends = self.program.reached_from(self.program.inputs[start:stop])

        def may_run_again(eqn: Equation) -> bool:
            return again(eqn, depends.isdisjoint(eqn.outvars))

        self.stashed = fewest_bytes(self.program, self.residuals, self.known, may_run_again)
        self.stashed_types = [v.aval for v in self.stashed]
        self.rest_types: list[jax.core.ShapedArray] = []
        self.remake = self.program.needed(self.residuals, given=[*self.known, *self.stashed])
        if split:
            self._split([v.aval for v in self.residuals], split_floats(y[0])[0])

    def forward(self, weights: PyTree, state: PyTree, x: PyTree, context: PyTree) -> tuple[PyTree, Arrays]:
        """Compute ((y, new state), residuals to stash)."""
        leaves = jax.tree.leaves((weights, state, x, context))
        run = self.program.run(self.program.eqns, self.program.inputs, leaves)
        return jax.tree.unflatten(self.y_tree, run(self.program.outputs[: self.n_y])), run(self.stashed)

    def forward_into(self, stash: Arrays, slot: Index, *operands: PyTree) -> tuple[PyTree, Arrays]:
        """Compute ((y, new state), the stash with the residuals in a slot) of the operands of `forward`."""
        read, stash = run_into_slot(self.program, jax.tree.leaves(operands), self.stashed, stash, slot)
        return jax.tree.unflatten(self.y_tree, read(self.program.outputs[: self.n_y])), stash

    def after(self, kept: Arrays, dy: PyTree) -> tuple[Arrays, PyTree]:
        """Let what the backward pass computes again wait for dy, without the gradients that only pass through."""
        used = {v for eqn in self.remake for v in eqn.invars if not is_constant(v)}
        waiting = [i for i, v in enumerate(self.stashed) if v in used]
        leaves, treedef = jax.tree.flatten(dy)
        first = [i for i, v in enumerate(self.floats_of_y) if v not in self.program.inputs]
        later, now = jax.lax.optimization_barrier(([kept[i] for i in waiting], [leaves[i] for i in first]))
        return replaced(kept, waiting, later), jax.tree.unflatten(treedef, replaced(leaves, first, now))

    def backward(
        self, weights: PyTree, context: PyTree, kept: Arrays, dy: PyTree, scope: str = ""
    ) -> tuple[PyTree, PyTree]:
        """Compute (gradient of diff, dx), in a scope what runs again; dx and dy have None where x is not floating."""
        with jax.named_scope(scope) if scope else nullcontext():
            values = self._residuals(weights, context, kept)
        return jax.tree.unflatten(self.pullback, values)(dy)

    def backward_from(
        self, stash: Arrays, slot: Index, weights: PyTree, context: PyTree, dy: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Compute `backward` with the residuals of a slot."""
        return run_from_slot(lambda kept: self.backward(weights, context, kept, dy), stash, slot)

    def input_backward(self, weights: PyTree, context: PyTree, kept: Arrays, dy: PyTree) -> tuple[PyTree, Arrays]:
        """Compute (dx, operands to keep until `weight_backward`)."""
        values = [*self._residuals(weights, context, kept), *jax.tree.leaves(dy)]
        run = self.back.run(self.first, self.back.inputs, values)
        return jax.tree.unflatten(self.dx_tree, run(self.dx)), run(self.crossing)

    def weight_backward(self, weights: PyTree, context: PyTree, kept: Arrays, rest: Arrays) -> PyTree:
        """Compute the gradient of diff."""
        values = self._residuals(weights, context, kept)
        run = self.back.run(self.second, [*self.back.inputs[: len(values)], *self.crossing], [*values, *rest])
        return jax.tree.unflatten(self.dw_tree, run(self.dw))

    def _residuals(self, weights: PyTree, context: PyTree, kept: Arrays) -> Arrays:
        values = [*jax.tree.leaves((weights, context)), *kept]
        return self.program.run(self.remake, [*self.known, *self.stashed], values)(self.residuals)

    def _split(self, residuals: Sequence[jax.core.ShapedArray], dy: PyTree) -> None:
        def backward(residuals: PyTree, dy: PyTree) -> PyTree:
            return jax.tree.unflatten(self.pullback, residuals)(dy)

        traced, (dw, dx) = jax.make_jaxpr(backward, return_shape=True)(residuals, dy)
        flat = jax.make_jaxpr(lambda *values: inlined(traced, values))(*jax.tree.leaves((residuals, dy)))
        self.back, (self.dw_tree, self.dx_tree) = Equations(flat), (jax.tree.structure(dw), jax.tree.structure(dx))
        n = len(jax.tree.leaves(dw))
        self.dw, self.dx = self.back.outputs[:n], self.back.outputs[n:]
        now = {v for eqn in self.back.needed(self.dx, given=self.back.inputs) for v in eqn.outvars}
        # Delay the products that only the weights' gradient needs, and everything computed from them. Equations that
        # feed them run now, so that `crossing`, the operands that wait, is as narrow as possible.
        later = [e for e in self.back.needed(self.dw, given=[*self.back.inputs, *now]) if not now & set(e.outvars)]
        products = {v for eqn in later if eqn.primitive.name in _PRODUCTS for v in eqn.outvars}
        reached = self.back.reached_from(products)
        self.second = [eqn for eqn in later if reached & set(eqn.outvars)]
        made = {v for eqn in self.second for v in eqn.outvars} | set(self.back.inputs[: len(residuals)])
        used = [v for eqn in self.second for v in eqn.invars] + self.dw
        self.crossing = list(dict.fromkeys(v for v in used if not is_constant(v) and v not in made))
        self.rest_types = [v.aval for v in self.crossing]
        self.first = self.back.needed([*self.dx, *self.crossing], given=self.back.inputs)


def split_floats(x: PyTree) -> tuple[PyTree, PyTree]:
    """Split a tree into (floating and complex leaves, other leaves); invert with `tree.combine`."""
    return partition(x, jax.tree.map(lambda v: jnp.issubdtype(v.dtype, jnp.inexact), x))
