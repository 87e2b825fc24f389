"""The table of rules: what each primitive does with arrays that are divided or partial; the simplest rules.

A rule is `rule(group, eqn, values) -> values`. It runs the equation's primitive on what this device holds, after it has
moved what is needed, and says how the results lie. A primitive without one computes on whole arrays, everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compat.kernels import function_primitive
from jzero.errors import ConfigError
from jzero.kernels.trace import Equation, elementwise_primitives
from jzero.spread.sharded_array import Axes, Dims, ModelGroup, ShardedArray, undivided, whole
from jzero.tracing.source_lines import located_here
from jzero.tree import PyTree

Rule = Callable[[ModelGroup, Equation, list[ShardedArray]], list[ShardedArray]]
RULES: dict[str, Rule] = {}
# Scopes of primitives that run on whole arrays although their operands were divided; the second in a backward pass of
# the model's own.
WHOLE_ARRAYS, WHOLE_BACKWARD = "whole_arrays", "whole_arrays_backward"

LINEAR = ("add", "sub", "add_any", "neg", "name")  # of several partial arrays


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of primitives."""

    def register(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


def bind(eqn: Equation, xs: Sequence[Any], **changed: Any) -> list[Any]:
    """Run the primitive of an equation on other arrays, with some of its parameters changed."""
    out = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params({**eqn.params, **changed}))
    return list(out) if eqn.primitive.multiple_results else [out]


def results(
    eqn: Equation, xs: Sequence[Any], dims: Dims, partial: Axes = (), weight: bool = False
) -> list[ShardedArray]:
    """Make the results of an equation, all divided alike."""
    return [ShardedArray(x, v.aval.shape, dims, partial, weight) for x, v in zip(xs, eqn.outvars, strict=True)]


def run_local(
    eqn: Equation, values: Sequence[ShardedArray], dims: Dims, partial: Axes = (), **changed: Any
) -> list[ShardedArray]:
    """Run the primitive on what this device holds, with some parameters changed; its results are divided alike.

    What is computed from weights, and from numbers, is a weight.
    """
    weight = any(v.weight for v in values) and all(v.weight or not v.shape for v in values)
    return results(eqn, bind(eqn, [v.x for v in values], **changed), dims, partial, weight)


def replicated(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Run a primitive on whole arrays, the same on every device."""
    scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not all(v.whole for v in values):
        group.traced.fall_back()
        scope = jax.named_scope(WHOLE_BACKWARD if group.backward else WHOLE_ARRAYS)
    gathered = [group.undivided(v).x for v in values]
    with scope:
        return [whole(x) for x in bind(eqn, gathered)]


@rule(*elementwise_primitives())
def elementwise(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    shape, first = eqn.outvars[0].aval.shape, values[0]
    if _keeps_sum(eqn, values):
        return run_local(eqn, values, first.dims, first.partial)
    # What is divided already says where a sum is scattered to: a residual stream, to which a product is added.
    settled = common([v for v in values if not v.partial], len(shape))
    values = [group.summed(v, settled) for v in values]
    dims = common(values, len(shape))
    return run_local(eqn, [group.place(v, _onto(v, shape, dims)) for v in values], dims)


def _keeps_sum(eqn: Equation, values: list[ShardedArray]) -> bool:
    """Return whether the primitive of the parts is a part of the result."""
    first, name = values[0], eqn.primitive.name
    if not first.partial:
        return False
    if name in LINEAR and all((v.partial, v.dims, v.shape) == (first.partial, first.dims, first.shape) for v in values):
        return True
    # A quotient of integers is rounded, and the sum of rounded parts is another number.
    scales = name == "mul" or (name == "div" and jnp.issubdtype(first.x.dtype, jnp.inexact))
    return scales and not values[1].shape and values[1].whole


def common(values: Sequence[ShardedArray], ndim: int) -> Dims:
    """Choose how arrays of one shape lie together: like the most divided one; others add what it leaves open."""
    dims: list[Axes] = [()] * ndim
    full = [v for v in values if len(v.shape) == ndim]
    for v in sorted(full, key=lambda v: (v.weight, -len(v.axes))):
        for d, axes in enumerate(v.dims):
            if not dims[d] and not {axis for taken in dims for axis in taken} & set(axes):
                dims[d] = axes
    return tuple(dims)


def _onto(v: ShardedArray, shape: Sequence[int], dims: Dims) -> Dims:
    """Divide an operand like the result; not where it is broadcast, and not a number beside arrays."""
    if len(v.shape) != len(shape):
        return undivided(len(v.shape))
    return tuple(() if n == 1 != size else axes for n, size, axes in zip(v.shape, shape, dims, strict=True))


@rule("reshard")
def reshard(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """JAX puts it before updates of arrays; without explicit shardings it does nothing."""
    return values


@rule("optimization_barrier")
def barrier(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    return [replace(v, x=x) for v, x in zip(values, bind(eqn, [v.x for v in values]), strict=True)]


# ------------------------------------------------------------------ a program's own collectives
# They run over axes outside the group: a loss of all replicas, a pipeline's ends.


@rule("psum", "ppermute", "pmax", "pmin")
def over_replicas(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """The sum of the parts is a part of the sum; their maximum is not."""
    if eqn.primitive.name in ("pmax", "pmin"):
        values = [group.summed(v) for v in values]
    found = zip(bind(eqn, [v.x for v in values]), eqn.outvars, values, strict=True)
    return [ShardedArray(x, out.aval.shape, v.dims, v.partial) for x, out, v in found]


@rule("all_gather", "reduce_scatter")
def along_replicas(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    p, (v,) = eqn.params, values
    gathers, tiled = eqn.primitive.name == "all_gather", p["tiled"]
    d = p["all_gather_dimension" if gathers else "scatter_dimension"]
    if (tiled or not gathers) and v.dims[d]:
        v = group.gathered(v, d)
    around = v.dims[:d], v.dims[d + (not gathers) :]
    return run_local(eqn, [v], v.dims if tiled else (*around[0], *[()] * gathers, *around[1]), v.partial)


# ------------------------------------------------------------------ operations of a model


class Operation:
    """A function of arrays that runs on shards by a function of its own instead of by the rules of its primitives.

    A kernel (Pallas) that a model calls is one: in `jzero.spread` a primitive without a rule runs on whole arrays.

    Args:
      plain: `plain(*arrays, **static) -> tree of arrays`, for one device; differentiable if the model trains through
        it. Positional arguments are trees of arrays; keywords are hashable and no arrays.
      spread: `spread(group, *values, **static) -> tree of ShardedArrays`, of the structure that `plain` returns. Each
        `jzero.spread.ShardedArray` says what this device holds of an array. It must be differentiable as it stands: the
        gradient of a value that is whole is the sum, over the devices, of the gradients that each computes.
      name: names it in reports; default: that of `plain`.

    >>> double = Operation(lambda x: x + x, lambda group, v: dataclasses.replace(v, x=v.x + v.x), "double")
    >>> double(jax.numpy.ones(2)).tolist()
    [2.0, 2.0]
    """

    def __init__(self, plain: Callable, spread: Callable, name: str | None = None):
        self.plain, self.spread = plain, spread
        self.name = name or getattr(plain, "__name__", repr(plain))
        # Two operations may have one name, and the table of rules goes by names.
        self._primitive = function_primitive(f"{self.name}_{id(self):x}")
        rule(self._primitive.name)(self._on_group)

    def __repr__(self) -> str:
        return f"Operation({self.name})"

    def __call__(self, *args: PyTree, **static: Hashable) -> PyTree:
        leaves, treedef = jax.tree.flatten(args)
        for name, value in static.items():
            try:
                hash(value)
            except TypeError:
                raise ConfigError(
                    f"{self}: {name} = {value!r} has no hash: pass arrays by position, and lists as tuples"
                ) from None

        def flat(*xs: jax.Array) -> PyTree:
            return self.plain(*jax.tree.unflatten(treedef, xs), **static)

        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        call = treedef, tuple(sorted(static.items())), jax.tree.structure(shape)
        return jax.tree.unflatten(call[-1], self._primitive.bind(*leaves, jaxpr=located_here(jaxpr), call=call))

    def _on_group(self, group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
        treedef, keywords, wanted = eqn.params["call"]
        out = self.spread(group, *jax.tree.unflatten(treedef, values), **dict(keywords))
        leaves, found = jax.tree.flatten(out, is_leaf=lambda x: isinstance(x, ShardedArray))
        if found != wanted or not all(isinstance(x, ShardedArray) for x in leaves):
            raise ConfigError(
                f"{self}: spread must return ShardedArrays in the structure of plain, {wanted}; returned {found}"
            )
        return leaves
