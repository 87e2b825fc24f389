"""Runs a jaxpr of whole arrays on shards, equation by equation, by the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jzero._compat import inner_jaxprs, is_constant
from jzero.errors import ConfigError
from jzero.fp8.product import CALLS
from jzero.fp8.quantized import Quantized
from jzero.spread.chained import Chained
from jzero.spread.rules import RULES, everywhere
from jzero.spread.value import Group, Value, dequantized, whole
from jzero.tracing.source_lines import source_line, source_of


def spread(f: Callable, group: Group) -> Callable:
    """Make `f`, a function of trees of whole arrays, a function of trees of `Value`s; so are its results.

    An array that is not a Value is the same on every device of the group. Call it inside `jax.shard_map`, manual over
    the axes of the group, with check_vma=False.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Value))
        values = [x if isinstance(x, Value) else whole(x) for x in leaves]

        def whole_arrays(*xs: Any) -> Any:
            args, kwargs = jax.tree.unflatten(treedef, xs)
            return f(*args, **kwargs)

        closed, out = jax.make_jaxpr(whole_arrays, return_shape=True)(*map(_shape, values))
        return jax.tree.unflatten(jax.tree.structure(out), interpret(group, closed, values))

    return run


def has_own_backward(eqn: Any) -> bool:
    """Return whether an equation is, or contains, a function with a backward pass of its own."""
    return eqn.primitive.name.startswith("custom_vjp_call") or any(
        has_own_backward(inside) for jaxpr in inner_jaxprs(eqn) for inside in jaxpr.eqns
    )


def _named_axes(eqn: Any) -> set[str]:
    """Return the mesh axes over which an equation of the model communicates, or asks for its place."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return {axis for axis in (found if isinstance(found, tuple | list) else (found,)) if isinstance(axis, str)}


def _shape(v: Value) -> jax.ShapeDtypeStruct:
    if isinstance(v.x, Quantized):
        return jax.ShapeDtypeStruct(v.shape, v.x.dtype)
    x: Any = jax.typeof(v.x)
    return jax.ShapeDtypeStruct(v.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def interpret(group: Group, closed: Any, values: Sequence[Value]) -> list[Value]:
    """Run a closed jaxpr on Values."""
    jaxpr, ledger = closed.jaxpr, group.ledger
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(whole, closed.consts), strict=True))
    known |= zip(jaxpr.invars, values, strict=True)

    def read(variables: Sequence[Any]) -> list[Value]:
        return [whole(v.val) if is_constant(v) else known[v] for v in variables]

    chained = Chained(group, jaxpr, known)
    for eqn in jaxpr.eqns:
        if id(eqn) in chained.skipped:
            continue
        if chained.takes(eqn):
            with source_of(eqn), eqn.ctx.manager:
                known |= zip(eqn.outvars, chained.run(eqn), strict=True)
            continue
        operands, name = read(eqn.invars), eqn.primitive.name
        if own := _named_axes(eqn) & group.degrees.keys():
            raise ConfigError(
                f"{source_line(eqn) or 'the model'}: {name} over the mesh axis {min(own)!r}: its devices act as one, "
                "and a model computes as if on one device; leave it out"
            )
        in_fp8 = any(isinstance(v.x, Quantized) for v in operands)
        if in_fp8 and name not in ("dot_general", *CALLS):
            operands, in_fp8 = [dequantized(v) for v in operands], False
        # What is whole stays whole: the primitive runs as it is, with the programs that it contains. The exception is
        # a backward pass of the model's own, which must see the gradient, not this device's share of it.
        as_it_is = not in_fp8 and all(v.whole for v in operands) and not (group.size > 1 and has_own_backward(eqn))
        run = everywhere if as_it_is else RULES.get(name, everywhere)
        before = ledger.line, ledger.primitive
        ledger.line, ledger.primitive = source_line(eqn) or ledger.line, name
        with source_of(eqn), eqn.ctx.manager:
            known |= zip(eqn.outvars, run(group, eqn, operands), strict=True)
        ledger.line, ledger.primitive = before
    return read(jaxpr.outvars)
