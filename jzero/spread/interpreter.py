"""Runs a jaxpr of whole arrays on shards, equation by equation, by the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jzero._compat import inner_jaxprs
from jzero.errors import ConfigError
from jzero.kernels.fp8 import matmul
from jzero.kernels.fp8.quantized import Quantized
from jzero.kernels.fusion.chains import Chains, form_of
from jzero.kernels.trace import CALLS, ClosedJaxpr, Equation, Jaxpr, Read, Variable, run_equations
from jzero.spread.rules import RULES, replicated, results
from jzero.spread.sharded_array import ModelGroup, ShardedArray, dequantized, undivided, whole
from jzero.tracing.equations import operations
from jzero.tracing.source_lines import source_line, source_of


def spread(f: Callable, group: ModelGroup) -> Callable:
    """Make `f`, a function of trees of whole arrays, a function of trees of `ShardedArray`s; so are its results.

    An array that is not one is the same on every device of the group. Call it inside `jax.shard_map`, manual over
    the axes of the group, with check_vma=False.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, ShardedArray))
        values = [x if isinstance(x, ShardedArray) else whole(x) for x in leaves]

        def whole_arrays(*xs: Any) -> Any:
            args, kwargs = jax.tree.unflatten(treedef, xs)
            return f(*args, **kwargs)

        closed, out = jax.make_jaxpr(whole_arrays, return_shape=True)(*map(_shape, values))
        return jax.tree.unflatten(jax.tree.structure(out), interpret(group, closed, values))

    return run


def has_own_backward(eqn: Equation) -> bool:
    """Return whether an equation is, or contains, a function with a backward pass of its own."""
    inside = (operation.name for jaxpr in inner_jaxprs(eqn) for operation in operations(jaxpr))
    return any(name.startswith("custom_vjp_call") for name in (eqn.primitive.name, *inside))


def _named_axes(eqn: Equation) -> set[str]:
    """Return the mesh axes over which an equation of the model communicates, or asks for its place."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return {axis for axis in (found if isinstance(found, tuple | list) else (found,)) if isinstance(axis, str)}


def _shape(v: ShardedArray) -> jax.ShapeDtypeStruct:
    if isinstance(v.x, Quantized):
        return jax.ShapeDtypeStruct(v.shape, v.x.dtype)
    x: Any = jax.typeof(v.x)
    return jax.ShapeDtypeStruct(v.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def interpret(group: ModelGroup, closed: ClosedJaxpr, values: Sequence[ShardedArray]) -> list[ShardedArray]:
    """Run a program on shards."""
    jaxpr = closed.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(whole, closed.consts), *values], strict=True))
    chained = _Chained(group, jaxpr, known)

    def step(eqn: Equation, read: Read[ShardedArray]) -> list[ShardedArray]:
        with source_of(eqn), eqn.ctx.manager:
            return chained.run(eqn) if chained.takes(eqn) else _run(group, eqn, read(eqn.invars))

    eqns = (eqn for eqn in jaxpr.eqns if id(eqn) not in chained.chains.skipped)
    return run_equations(eqns, known, step, whole)(jaxpr.outvars)


def _run(group: ModelGroup, eqn: Equation, operands: list[ShardedArray]) -> list[ShardedArray]:
    """Run an equation by its rule; the group's moves get its line."""
    traced, name = group.traced, eqn.primitive.name
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
    before = traced.line, traced.primitive
    traced.line, traced.primitive = source_line(eqn) or traced.line, name
    found = (replicated if as_it_is else RULES.get(name, replicated))(group, eqn, operands)
    traced.line, traced.primitive = before
    return found


class _Chained:
    """The chains of a program with weights in fp8.

    A group of several devices runs the equations one by one: its shards may lie otherwise in each product.
    """

    def __init__(self, group: ModelGroup, jaxpr: Jaxpr, known: dict[Variable, ShardedArray]):
        self._group, self._known, self._links = group, known, dict[Variable, matmul.GradientLink]()
        alone = group.size == 1
        self.chains = Chains(jaxpr, lambda v: alone and v in known and isinstance(known[v].x, Quantized), True)
        self._sources = {v for chain in self.chains.of.values() for v, _ in chain.sources}

    def takes(self, eqn: Equation) -> bool:
        """Return whether an equation is one of a chain's products."""
        return id(eqn) in self.chains.of or not self._sources.isdisjoint(eqn.outvars)

    def run(self, eqn: Equation) -> list[ShardedArray]:
        """Run the first or the last product of a chain."""
        chain, out = self.chains.of.get(id(eqn)), eqn.outvars[0]
        w, dtype = self._known[eqn.invars[1]].x, out.aval.dtype
        if chain and out not in self._sources:
            xs = chain.parts([self._known[v].x for v, _ in chain.sources])
            y = matmul.mapped_fp8_dot_general(chain.f, xs, [self._links[v] for v, _ in chain.sources], w, dtype)
        else:
            x = self._known[eqn.invars[0]]
            form = form_of(eqn.params["dimension_numbers"], (len(x.shape), len(w.shape)), 1)
            assert form is not None  # noqa: S101  # `Chains` asks for one
            y, self._links[out] = matmul.linked_dot_general(x.x, w, form, dtype, self._group.casts(x))
        return results(eqn, [y.reshape(out.aval.shape)], undivided(out.aval.ndim))
