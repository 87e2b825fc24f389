"""`auto_cast`: which floating-point arrays of a batch are cast to the compute dtype.

Casting all of them would take digits from targets, masks, time steps and sample weights. By default an array is cast if
the model does nothing with it but multiply it with half-precision weights. The product then rounds it anyway, in any
framework's automatic mixed precision, and the rest of the loss is left as it is. A layer that was declared float32
(`dtype=jnp.float32`) widens its weights, and keeps its inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jzero._compat import inner_jaxprs
from jzero.kernels.trace import CALLS, Equation, Jaxpr, Read, run_equations
from jzero.model import Inputs, Model, loss_of_passes
from jzero.tree import PyTree, named, path_name

SCOPE = "jzero_auto_cast:"  # the name of the cast in the program: this, and the name of the array

_PRODUCTS = ("dot_general", "conv_general_dilated")
# Operations that keep every element, or scale it: rounding before them is rounding after them. Not a sum, in which a
# large offset may cancel.
_LAYOUT = (
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "gather", "pad",
    "concatenate", "split", "rev", "select_n", "convert_element_type", "copy", "mul", "div", "neg",
)  # fmt: skip


def cast_arrays(batch: PyTree, names: Collection[str], dtype: DTypeLike) -> PyTree:
    """Cast these arrays of a batch."""

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        if (name := path_name(path)) not in names:
            return x
        with jax.named_scope(SCOPE + name):
            return x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, batch)


def wide_arrays(batch: PyTree, dtype: DTypeLike) -> list[str]:
    """List the arrays of a batch whose dtype is a wider float than `dtype`."""
    return [
        name
        for name, x in named(batch).items()
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > jnp.dtype(dtype).itemsize
    ]


def inputs_of_products(
    model: Model, weights: PyTree, inputs: Inputs, key: jax.Array | None, dtype: DTypeLike
) -> frozenset[str]:
    """Choose the arrays of a batch that the model only multiplies with its half-precision weights.

    The loss is traced, first as it is; then with the arrays cast that reach only products with weights, and widen one
    of them. Those whose products are then all in half precision are chosen.

    Args:
      weights, inputs, key: the whole weights in the compute dtype, one micro-batch, its key; only shapes are used.
      dtype: the compute dtype.
    """
    wide = frozenset(wide_arrays(inputs.batch, dtype))
    if not wide:
        return wide
    loss = loss_of_passes(model)

    def uses(cast: Collection[str]) -> _Uses:
        batch = jax.eval_shape(lambda batch: cast_arrays(batch, cast, dtype), inputs.batch)
        jaxpr = jax.make_jaxpr(loss)(weights, inputs._replace(batch=batch), key).jaxpr
        facts = [_Fact(of_weights=True)] * len(jax.tree.leaves(weights))
        facts += [_Fact(frozenset({name}), of_batch=True) for name in named(inputs.batch)]
        found = _Uses()
        for fact in found.run(jaxpr, [*facts, *[_NOTHING] * (len(jaxpr.invars) - len(facts))]):
            found.other |= fact.arrays
        return found

    try:
        plain = uses(())
        chosen = wide & plain.only_products() - plain.only_products(half=True)
        while chosen and chosen != (half := chosen & uses(chosen).only_products(half=True)):
            chosen = half
    except Exception:
        # As for the count of a loss: the passes may run what this trace cannot (a stack whose layers change the dtype),
        # or have the better error.
        return frozenset()
    return chosen


class _Fact(NamedTuple):
    """The facts about a variable: the arrays of the batch whose elements it has, and what it depends on."""

    arrays: frozenset[str] = frozenset()
    of_batch: bool = False
    of_weights: bool = False


_NOTHING = _Fact()


def _either(*facts: _Fact) -> _Fact:
    """Join what is known of several variables."""
    arrays: frozenset[str] = frozenset().union(*(fact.arrays for fact in facts))
    return _Fact(arrays, any(fact.of_batch for fact in facts), any(fact.of_weights for fact in facts))


class _Uses:
    """The uses of the arrays of the batch in a program.

    Attributes:
      products: {array: whether all its products with weights are in half precision}.
      other: arrays that are used in any other way.
    """

    def __init__(self) -> None:
        self.products: dict[str, bool] = {}
        self.other: frozenset[str] = frozenset()

    def only_products(self, half: bool = False) -> frozenset[str]:
        """Return the arrays that reach only products with weights; with `half`, only those in half precision."""
        return frozenset(name for name, is_half in self.products.items() if is_half >= half) - self.other

    def run(self, jaxpr: Jaxpr, facts: Sequence[_Fact]) -> list[_Fact]:
        known = dict(zip(jaxpr.invars, facts, strict=True)) | dict.fromkeys(jaxpr.constvars, _NOTHING)
        return run_equations(jaxpr.eqns, known, self.outputs, lambda _: _NOTHING)(jaxpr.outvars)

    def outputs(self, eqn: Equation, read: Read[_Fact]) -> list[_Fact]:
        name, inner, facts = eqn.primitive.name, inner_jaxprs(eqn), read(eqn.invars)
        if name == "cond":
            return self.branches(inner, *facts)
        if name == "scan":
            return self.scan(eqn, inner[0], facts)
        if name in (*CALLS, "custom_jvp_call", "custom_vjp_call") and len(inner[0].invars) == len(facts):
            return self.run(inner[0], facts)
        arrays, of_batch, of_weights = _either(*facts)
        if name in _PRODUCTS:
            self.multiply(eqn, *facts)
            arrays = frozenset()
        elif name not in _LAYOUT or not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars):
            self.other |= arrays
            arrays = frozenset()
        return [_Fact(arrays, of_batch, of_weights)] * len(eqn.outvars)

    def branches(self, inner: Sequence[Jaxpr], index: _Fact, *facts: _Fact) -> list[_Fact]:
        """Follow every branch of a condition."""
        self.other |= index.arrays
        return [_either(*results) for results in zip(*(self.run(branch, facts) for branch in inner), strict=True)]

    def scan(self, eqn: Equation, body: Jaxpr, facts: list[_Fact]) -> list[_Fact]:
        """Follow one pass of a scan, whose carry may depend on the batch after the first."""
        # jax 0.10 and 0.11 have different parameters; what is sliced and stacked has one more dimension outside.
        carry = sum(v.aval.ndim == inner.aval.ndim for v, inner in zip(eqn.outvars, body.outvars, strict=True))
        sliced = sum(v.aval.ndim > inner.aval.ndim for v, inner in zip(eqn.invars, body.invars, strict=True))
        first = len(facts) - sliced - carry
        carried = [fact._replace(of_batch=True) for fact in facts[first : first + carry]]
        results = self.run(body, [*facts[:first], *carried, *facts[first + carry :]])
        for fact in results[:carry]:
            self.other |= fact.arrays
        return results

    def multiply(self, eqn: Equation, lhs: _Fact, rhs: _Fact) -> None:
        half = all(v.aval.dtype.itemsize <= 2 for v in eqn.invars)
        for fact, factor in ((lhs, rhs), (rhs, lhs)):
            if factor.of_weights and not factor.of_batch:
                self.products |= {name: half and self.products.get(name, True) for name in fact.arrays}
            else:
                self.other |= fact.arrays
