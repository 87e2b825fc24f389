"""Rules of primitives that contain programs: calls, checkpoints, loops, conditions and custom derivatives."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero._compat import closed_jaxpr, scan_sizes
from jzero.spread.interpreter import interpret
from jzero.spread.rules import bind, everywhere, rule
from jzero.spread.value import Group, Value


@rule("jit", "closed_call", "core_call")
def call(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    return interpret(group, _inside(eqn), values)


@rule("remat2", "checkpoint")
def checkpoint(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    p = eqn.params
    run = jax.checkpoint(partial(interpret, group, _inside(eqn)), policy=p["policy"], prevent_cse=p["prevent_cse"])
    return run(values)


def _inside(eqn: Any) -> Any:
    return closed_jaxpr(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


@rule("scan")
def scan(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Between its turns, what a loop carries lies as activations do between layers."""
    p, (n, m) = eqn.params, scan_sizes(eqn)
    consts, carry = values[:n], [_activation(group.rested(v)) for v in values[n : n + m]]
    xs = [group.gathered(v, 0) for v in values[n + m :]]
    outs: list[Value] = []

    def body(carried: list[Value], xs_of_turn: list[Any]) -> Any:
        items = [Value(x, v.shape[1:], v.dims[1:], weight=v.weight) for x, v in zip(xs_of_turn, xs, strict=True)]
        ys = interpret(group, _inside(eqn), [*_copies(consts), *carried, *items])
        outs[:] = [group.summed(v) for v in ys[len(carry) :]]
        new = [_activation(group.place(v, c.dims)) for v, c in zip(ys[: len(carry)], carry, strict=True)]
        return new, [v.x for v in outs]

    last, ys = lax.scan(body, carry, [v.x for v in xs], p["length"], p["reverse"], p["unroll"])
    stacked = [Value(y, (p["length"], *v.shape), ((), *v.dims)) for y, v in zip(ys, outs, strict=True)]
    return [*last, *stacked]


def _activation(v: Value) -> Value:
    return Value(v.x, v.shape, v.dims)


def _copies(values: list[Value]) -> list[Value]:
    """Copy values for a loop: an array that is moved inside of it is not known outside."""
    return [Value(v.x, v.shape, v.dims, v.partial, v.weight) for v in values]


@rule("while")
def while_(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Between its turns, what a loop carries lies as in a scan. All devices of the group take the same turns."""
    p = eqn.params
    if p["cond_jaxpr"].out_avals[0].shape:  # under vmap each row of the carry ends at a turn of its own
        return everywhere(group, eqn, values)
    values = [group.summed(v) for v in values]
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

    def rested(found: list[Value]) -> list[Value]:
        return [_activation(group.rested(v)) for v in found]

    def goes_on(carried: list[Value]) -> Any:
        (found,) = interpret(group, closed_jaxpr(p["cond_jaxpr"]), [*_copies(values[:n]), *carried])
        return group.undivided(found).x

    def body(carried: list[Value]) -> list[Value]:
        return rested(interpret(group, closed_jaxpr(p["body_jaxpr"]), [*_copies(values[n:m]), *carried]))

    return lax.while_loop(goes_on, body, rested(values[m:]))


@rule("cond")
def cond(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Results lie as activations do between layers, whichever branch runs. The group's devices take the same one."""
    index, *operands = [group.summed(v) for v in values]

    def branch(jaxpr: Any) -> Any:
        def run(*xs: Value) -> list[Value]:
            return [_activation(group.rested(v)) for v in interpret(group, closed_jaxpr(jaxpr), list(xs))]

        return run

    return lax.switch(group.undivided(index).x, [branch(jaxpr) for jaxpr in eqn.params["branches"]], *operands)


# ------------------------------------------------------------------ custom derivatives


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _shapes(variables: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in variables]


def _floats(variables: Any) -> list[bool]:
    return [_is_float(v.aval) for v in variables]


def _pick(xs: Any, flags: list[bool], wanted: bool) -> list[Any]:
    return [x for x, flag in zip(xs, flags, strict=True) if flag is wanted]


def _of_floats(eqn: Any, others: Any) -> Any:
    """Make the function of an equation's floating-point operands, given its others."""
    flags = _floats(eqn.invars)

    def f(*floats: Any) -> list[Any]:
        first, second = iter(floats), iter(others)
        return bind(eqn, [next(first) if flag else next(second) for flag in flags])

    return f


def _split(eqn: Any) -> tuple[list[Any], list[Any]]:
    flags, shapes = _floats(eqn.invars), _shapes(eqn.invars)
    return _pick(shapes, flags, True), _pick(shapes, flags, False)


@rule("custom_jvp_call")
def custom_jvp(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Run the function and its own derivative, both on shards."""
    if not all(_floats(eqn.outvars)):
        return everywhere(group, eqn, values)
    values = [group.summed(v) for v in values]
    flags, n = _floats(eqn.invars), len(eqn.outvars)
    floats, others = _split(eqn)

    def derivative(x: Any, tangents: Any, rest: Any) -> Any:
        return jax.jvp(_of_floats(eqn, rest), x, tangents)

    both = jax.make_jaxpr(derivative)(floats, floats, others)

    forms: list[Any] = []  # how the results lie, the same by both programs

    def settled(found: list[Value]) -> list[Value]:
        found = [group.summed(v) for v in found]
        forms[:] = forms or [v.dims for v in found]
        return [_activation(group.place(v, dims)) for v, dims in zip(found, forms, strict=True)]

    @jax.custom_jvp
    def run(*xs: Value) -> list[Value]:
        return settled(interpret(group, _inside(eqn), list(xs)))

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        x, rest = (_pick(primals, flags, wanted) for wanted in (True, False))
        found = interpret(group, both, [*x, *_pick(tangents, flags, True), *rest])
        return settled(found[:n]), settled(found[n:])

    return run(*values)


@rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def custom_vjp(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Run the function, its own forward and its own backward pass, all on shards."""
    if group.no_gradient:
        return interpret(group, _inside(eqn), values)
    values, flags, n = [group.summed(v) for v in values], _floats(eqn.invars), len(eqn.outvars)
    has_gradient = _floats(eqn.outvars)
    floats, others = _split(eqn)
    pullback: list[Any] = []  # its structure

    def forward(x: Any, rest: Any) -> Any:
        ys, pull = jax.vjp(_of_floats(eqn, rest), *x)
        residuals, treedef = jax.tree.flatten(pull)
        pullback[:] = [treedef]
        return ys, residuals

    program, (_, residual_shapes) = jax.make_jaxpr(forward, return_shape=True)(floats, others)

    def backward(residuals: Any, gradients: Any) -> Any:
        found = iter(gradients)
        nothing = [np.zeros(v.aval.shape, jax.dtypes.float0) for v in eqn.outvars]
        every = [next(found) if flag else zeros for flag, zeros in zip(has_gradient, nothing, strict=True)]
        return jax.tree.unflatten(pullback[0], residuals)(every)

    back = jax.make_jaxpr(backward)(residual_shapes, _pick(_shapes(eqn.outvars), has_gradient, True))

    @jax.custom_vjp
    def run(*xs: Value) -> list[Value]:
        return run_forward(*xs)[0]

    def run_forward(*xs: Value) -> Any:
        x, rest = (_pick(xs, flags, wanted) for wanted in (True, False))
        with group.without_gradient():  # which often calls the function itself
            found = interpret(group, program, [*x, *rest])
        return [group.summed(v) for v in found[:n]], found[n:]

    def run_backward(residuals: list[Value], gradients: list[Value]) -> Any:
        # A gradient arrives in shares, see `value`: it is partial over the axes that do not divide it.
        shares = _pick(gradients, has_gradient, True)
        parts = [Value(g.x, g.shape, g.dims, tuple(a for a in group.degrees if a not in g.axes)) for g in shares]
        with group.without_gradient(backward=True):
            found = iter(interpret(group, back, [*residuals, *parts]))
        # Of the operands their form alone is used here: as residuals they would stay in memory.
        return tuple(_gradient(group, next(found), v) if flag else None for v, flag in zip(values, flags, strict=True))

    run.defvjp(run_forward, run_backward)
    return run(*values)


def _gradient(group: Group, gradient: Value, of: Value) -> Value:
    share = group.share(gradient, of.dims).astype(of.x.dtype)
    return Value(share, of.shape, of.dims, of.partial, of.weight)
