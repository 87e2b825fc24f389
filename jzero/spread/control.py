"""Rules of primitives that contain programs: calls, checkpoints, loops, conditions and custom derivatives.

Where several programs must agree on the form of an array (the turns of a loop, the branches of a condition), it lies as
activations do between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero._compat import closed_jaxpr, scan_sizes
from jzero.kernels.fusion.parts import FROZEN
from jzero.kernels.trace import CALLS, Equation, Variable, program_of
from jzero.spread.interpreter import interpret, spread
from jzero.spread.rules import bind, replicated, rule
from jzero.spread.sharded_array import ModelGroup, ShardedArray
from jzero.tree import PyTree, combine, partition


@rule(*CALLS, "softmax_rows", FROZEN)  # softmax_rows of jzero.kernels.softmax, whose rows may be divided
def call(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    run, p = partial(interpret, group, program_of(eqn)), eqn.params
    if "prevent_cse" in p:
        return jax.checkpoint(run, policy=p["policy"], prevent_cse=p["prevent_cse"])(values)
    return run(values)


@rule("scan")
def scan(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    p, (n, m) = eqn.params, scan_sizes(eqn)
    consts, carry = values[:n], _settled(group, values[n : n + m])
    xs = [group.gathered(v, 0) for v in values[n + m :]]
    outs: list[ShardedArray] = []

    def body(carried: list[ShardedArray], xs_of_turn: list[jax.Array]) -> tuple[list[ShardedArray], list[jax.Array]]:
        items = [ShardedArray(x, v.shape[1:], v.dims[1:], weight=v.weight) for x, v in zip(xs_of_turn, xs, strict=True)]
        ys = interpret(group, program_of(eqn), [*_copies(consts), *carried, *items])
        outs[:] = [group.summed(v) for v in ys[m:]]
        new = [group.place(v, c.dims).activation for v, c in zip(ys[:m], carry, strict=True)]
        return new, [v.x for v in outs]

    last, ys = lax.scan(body, carry, [v.x for v in xs], p["length"], p["reverse"], p["unroll"])
    stacked = [ShardedArray(y, (p["length"], *v.shape), ((), *v.dims)) for y, v in zip(ys, outs, strict=True)]
    return [*last, *stacked]


@rule("while")
def while_(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """All devices of the group take the same turns."""
    p = eqn.params
    if p["cond_jaxpr"].out_avals[0].shape:  # under vmap each row of the carry ends at a turn of its own
        return replicated(group, eqn, values)
    values = [group.summed(v) for v in values]
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

    def goes_on(carried: list[ShardedArray]) -> jax.Array:
        (found,) = interpret(group, closed_jaxpr(p["cond_jaxpr"]), [*_copies(values[:n]), *carried])
        return group.undivided(found).x

    def body(carried: list[ShardedArray]) -> list[ShardedArray]:
        return _settled(group, interpret(group, closed_jaxpr(p["body_jaxpr"]), [*_copies(values[n:m]), *carried]))

    return lax.while_loop(goes_on, body, _settled(group, values[m:]))


@rule("cond")
def cond(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """The group's devices take the same branch."""
    index, *operands = [group.summed(v) for v in values]

    def run(jaxpr: Any, *xs: ShardedArray) -> list[ShardedArray]:
        return _settled(group, interpret(group, closed_jaxpr(jaxpr), list(xs)))

    return lax.switch(group.undivided(index).x, [partial(run, branch) for branch in eqn.params["branches"]], *operands)


def _settled(group: ModelGroup, values: Sequence[ShardedArray]) -> list[ShardedArray]:
    return [group.in_activation_layout(v).activation for v in values]


def _copies(values: list[ShardedArray]) -> list[ShardedArray]:
    """Copy values for a loop: an array that is moved inside of it is not known outside."""
    return [replace(v) for v in values]


# ------------------------------------------------------------------ custom derivatives
# A function with a derivative of its own is run as JAX differentiates it: what `jax.jvp` and `jax.vjp` make of its
# equation is traced on whole arrays, and runs on shards. JAX's own records of these derivatives are private.


def _floats(variables: Sequence[Variable]) -> list[bool]:
    return [bool(jnp.issubdtype(v.aval.dtype, jnp.inexact)) for v in variables]


def _of_floats(eqn: Equation, others: PyTree, floats: PyTree) -> list[jax.Array]:
    """Run an equation on its floating-point operands and its others, each with None in the other's places."""
    return bind(eqn, combine(floats, others))


@rule("custom_jvp_call")
def custom_jvp(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Run the function and its own derivative, both on shards."""
    if not all(_floats(eqn.outvars)):
        return replicated(group, eqn, values)
    values, forms = [group.summed(v) for v in values], list[Any]()  # forms of the results, the same by both programs

    def derivative(x: PyTree, tangents: PyTree, others: PyTree) -> Any:
        return jax.jvp(partial(_of_floats, eqn, others), (x,), (tangents,))

    def settled(found: list[ShardedArray]) -> list[ShardedArray]:
        found = [group.summed(v) for v in found]
        forms[:] = forms or [v.dims for v in found]
        return [group.place(v, dims).activation for v, dims in zip(found, forms, strict=True)]

    @jax.custom_jvp
    def run(*xs: ShardedArray) -> list[ShardedArray]:
        return settled(interpret(group, program_of(eqn), list(xs)))

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, others), (dx, _) = (partition(list(xs), _floats(eqn.invars)) for xs in (primals, tangents))
        return tuple(map(settled, spread(derivative, group)(x, dx, others)))

    return run(*values)


@rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def custom_vjp(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Run the function, its own forward and its own backward pass, all on shards."""
    if group.no_gradient:
        return interpret(group, program_of(eqn), values)
    values, has_gradient = [group.summed(v) for v in values], _floats(eqn.outvars)
    constants = eqn.params["num_consts"]  # closed-over arrays come first, and have no gradient
    floats = [False] * constants + _floats(eqn.invars[constants:])

    def forward(x: PyTree, others: PyTree) -> Any:
        return jax.vjp(partial(_of_floats, eqn, others), x)

    def backward(pullback: Any, gradients: PyTree) -> Any:
        every = [
            np.zeros(v.aval.shape, jax.dtypes.float0) if g is None else g
            for v, g in zip(eqn.outvars, gradients, strict=True)
        ]
        (found,) = pullback(every)
        return found

    @jax.custom_vjp
    def run(*xs: ShardedArray) -> list[ShardedArray]:
        return run_forward(*xs)[0]

    def run_forward(*xs: ShardedArray) -> Any:
        with group.without_gradient():  # which often calls the function itself
            ys, pullback = spread(forward, group)(*partition(list(xs), floats))
        return [group.summed(v) for v in ys], pullback

    def run_backward(pullback: Any, gradients: list[ShardedArray]) -> Any:
        # A gradient arrives in shares, see `sharded_array`: it is partial over the axes that do not divide it.
        shares = [
            ShardedArray(g.x, g.shape, g.dims, tuple(a for a in group.degrees if a not in g.axes)) if flag else None
            for g, flag in zip(gradients, has_gradient, strict=True)
        ]
        with group.without_gradient(backward=True):
            found = spread(backward, group)(pullback, shares)
        # Of the operands their form alone is used here: as residuals they would stay in memory.
        return tuple(None if dx is None else gradient(dx, v) for dx, v in zip(found, values, strict=True))

    def gradient(found: ShardedArray, of: ShardedArray) -> ShardedArray:
        return replace(of, x=group.share(found, of.dims).astype(of.x.dtype))

    run.defvjp(run_forward, run_backward)
    return run(*values)
