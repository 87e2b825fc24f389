"""Which weights are multiplied in fp8: those of the layer stack that a layer uses for nothing but large products.

The first and last parameters of a model, `ends`, stay in the compute dtype, as in Megatron and torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax

from jzero._compat import inner_jaxprs, is_constant
from jzero.errors import ConfigError, some_of
from jzero.fp8.product import CALLS
from jzero.fusion.form import form_of
from jzero.model import ENDS, STACK, Inputs, Model, StackModel, stack_functions
from jzero.stored_names import StoredNames, matches
from jzero.tree import PyTree, named

LARGE = 0.01  # of a layer's elements; smaller weights need no reason to stay in the compute dtype


@dataclass(frozen=True)
class Choice:
    """Which parameters of the stack are multiplied in fp8.

    Attributes:
      names: of these.
      others: name -> why it is not, of the other large ones.
    """

    names: frozenset[str] = frozenset()
    others: dict[str, str] = field(default_factory=dict)


@dataclass
class Noted:
    """The choice of the last program that was traced; None before it."""

    choice: Choice | None = None

    def choose(
        self, model: Model, weights: PyTree, inputs: Inputs, key: jax.Array | None, section: Any
    ) -> frozenset[str]:
        """Choose the weights, record the choice, and return their names."""
        self.choice = weights_in_fp8(model, weights, inputs, key, section, getattr(model, "names", None))
        return self.choice.names


def weights_in_fp8(
    model: Model, weights: PyTree, inputs: Inputs, key: jax.Array | None, section: Any, names: StoredNames | None
) -> Choice:
    """Choose the parameters that are multiplied in fp8.

    Args:
      weights, inputs, key: the whole weights in the compute dtype, one micro-batch, its key; only shapes are used.
      section: the config's `fp8`.
      names: the parameters' names without a layer stack, which `exclude` may match too.

    Raises:
      ConfigError: a model without a layer stack, an expression that matches no parameter, or nothing to choose.
    """
    if not isinstance(model, StackModel):
        raise ConfigError(
            f"fp8.enabled = true: {model!r} has no layer stack, whose weights are multiplied in fp8; name it with "
            "jzero.from_flax(..., stack=), or turn fp8 off"
        )
    prefix, block, _ = stack_functions(model)
    x, _ = jax.eval_shape(prefix, weights[ENDS], inputs, key)
    layer = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), weights[STACK])
    jaxpr = jax.make_jaxpr(block)(layer, x, key).jaxpr
    uses: dict[str, list[int]] = {}
    variables = dict(zip(jaxpr.invars, named(layer), strict=False))  # x and key follow
    for name, size in _uses(jaxpr, variables):
        uses.setdefault(f"{STACK}/{name}", []).append(size)
    excluded = excluded_names(section.exclude, list(named(weights)), names)
    least = max(section.min_size, 1)
    large = frozenset(name for name, sizes in uses.items() if min(sizes) >= least)
    if not large - excluded:
        raise ConfigError(
            f"fp8.enabled = true: no weight of a layer of {model!r} is used for nothing but products with bfloat16 "
            f"activations of fp8.min_size = {section.min_size} or more in and out and is outside fp8.exclude; "
            "lower min_size (smaller products gain nothing), let the model compute in bfloat16 (nnx.Embed has "
            "float32 results without dtype=jnp.bfloat16), or turn fp8 off"
        )
    return Choice(large - excluded, _others(layer, uses, excluded, least))


def large_weights(section: Any, layouts: Sequence[Any], names: StoredNames | None) -> frozenset[str]:
    """Return the parameters whose size lets them be multiplied in fp8, before a trace shows their use."""
    excluded = excluded_names(section.exclude, [layout.name for layout in layouts], names)
    return frozenset(
        layout.name
        for layout in layouts
        if layout.stacked and not layout.state and len(layout.shape) > 2
        and prod(layout.shape[1:]) >= max(section.min_size, 1) ** 2
    ) - excluded  # fmt: skip


def _others(layer: PyTree, uses: dict[str, list[int]], excluded: frozenset[str], least: int) -> dict[str, str]:
    sizes, found = {f"{STACK}/{name}": prod(w.shape) for name, w in named(layer).items()}, {}
    for name, size in sizes.items():
        if size < LARGE * sum(sizes.values()):
            continue
        smallest = min(uses.get(name, [0]))
        if name in excluded:
            found[name] = "excluded"
        elif not smallest:
            found[name] = "not used in products with half-precision activations alone"
        elif smallest < least:
            found[name] = f"{smallest} in or out, below min_size = {least}"
    return found


def excluded_names(patterns: Sequence[str], every: Sequence[str], names: StoredNames | None) -> frozenset[str]:
    """Return the parameters that `fp8.exclude` matches; raise ConfigError for an expression that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name in every if matches(f"fp8.exclude: {pattern!r}", pattern, name, names)}
        if not hits:
            raise ConfigError(
                f"fp8.exclude: {pattern!r} matches no parameter; leave it out, or correct it; the stack has "
                f"{some_of([name for name in every if name.startswith(STACK)], 4)}"
            )
        found |= hits
    return frozenset(found)


def _uses(jaxpr: Any, names: dict[Any, str]) -> Iterator[tuple[str, int]]:
    """Yield (weight, size) of each use: the smaller of a product's two dimensions; 0 for any other use."""
    for eqn in jaxpr.eqns:
        marked = [(i, names[v]) for i, v in enumerate(eqn.invars) if not is_constant(v) and v in names]
        if not marked:
            continue
        inner = inner_jaxprs(eqn)
        if eqn.primitive.name in CALLS and len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
            yield from _uses(inner[0], {inner[0].invars[i]: name for i, name in marked})
            continue
        for i, name in marked:
            yield name, _product_size(eqn, i) if len(marked) == 1 else 0
    yield from ((names[v], 0) for v in jaxpr.outvars if not is_constant(v) and v in names)


def _product_size(eqn: Any, i: int) -> int:
    """Return the smaller of the contracted and the kept size of operand i; 0 if it is no factor of a product."""
    if eqn.primitive.name != "dot_general":
        return 0
    shapes = tuple(v.aval.shape for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    other = eqn.invars[1 - i].aval
    if form_of(numbers, (len(shapes[0]), len(shapes[1])), i) is None or other.dtype.itemsize != 2:
        return 0
    contracted = prod(shapes[i][d] for d in numbers[0][i])
    return min(contracted, prod(shapes[i]) // contracted)
