"""Which weights are multiplied in fp8: those of the layer stack that a layer uses for nothing but large products.

The first and last parameters of a model, `ends`, stay in the compute dtype, as in Megatron and torchtitan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax

from jzero.errors import ConfigError, some_of
from jzero.kernels.fusion.chains import form_of
from jzero.kernels.trace import CALLS, Equation, Jaxpr, Read, program_of, run_equations
from jzero.model import ENDS, STACK, Inputs, Model, StackModel, stack_functions
from jzero.stored_names import StoredNames, matches
from jzero.tree import PyTree, named

NOTABLE_SHARE = 0.01  # of a layer's elements; smaller weights need no reason to stay in the compute dtype


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
        """Choose the weights that are multiplied in fp8, record the choice, and return their names.

        Args:
          weights, inputs, key: the whole weights in the compute dtype, one micro-batch, its key; only shapes are used.
          section: the config's `fp8`.

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
        uses: dict[str, list[int]] = {}
        for name, size in _uses(jax.make_jaxpr(block)(layer, x, key).jaxpr, list(named(layer))):
            uses.setdefault(f"{STACK}/{name}", []).append(size)
        excluded = excluded_names(section.exclude, list(named(weights)), getattr(model, "names", None))
        least = max(section.min_size, 1)
        chosen = frozenset(name for name, sizes in uses.items() if min(sizes) >= least) - excluded
        if not chosen:
            raise ConfigError(
                f"fp8.enabled = true: no weight of a layer of {model!r} is used for nothing but matmuls with bfloat16 "
                f"activations of fp8.min_size = {section.min_size} or more in and out and is outside fp8.exclude; "
                "lower min_size (smaller matmuls gain nothing), let the model compute in bfloat16 (nnx.Embed has "
                "float32 results without dtype=jnp.bfloat16), or turn fp8 off"
            )
        self.choice = Choice(chosen, _others(layer, uses, excluded, least))
        return chosen


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
        if size < NOTABLE_SHARE * sum(sizes.values()):
            continue
        smallest = min(uses.get(name, [0]))
        if name in excluded:
            found[name] = "excluded"
        elif not smallest:
            found[name] = "not used in matmuls with half-precision activations alone"
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


def _uses(jaxpr: Jaxpr, names: Sequence[str]) -> list[tuple[str, int]]:
    """List (weight, size) of each use: the smaller of a matmul's two dimensions; 0 for any other use.

    Args:
      names: of the weights, which are the first inputs.
    """
    found: list[tuple[str, int]] = []

    def follow(jaxpr: Jaxpr, inputs: Sequence[str]) -> list[str]:
        known = dict.fromkeys(jaxpr.constvars, "") | dict(zip(jaxpr.invars, inputs, strict=True))
        return run_equations(jaxpr.eqns, known, step, lambda _: "")(jaxpr.outvars)

    def step(eqn: Equation, read: Read[str]) -> list[str]:
        inputs = read(eqn.invars)
        if eqn.primitive.name in CALLS and any(inputs):
            return follow(program_of(eqn).jaxpr, inputs)
        alone = sum(map(bool, inputs)) == 1
        found.extend((name, _product_size(eqn, i) if alone else 0) for i, name in enumerate(inputs) if name)
        return [""] * len(eqn.outvars)

    returned = follow(jaxpr, [*names, *[""] * (len(jaxpr.invars) - len(names))])
    return [*found, *((name, 0) for name in returned if name)]


def _product_size(eqn: Equation, i: int) -> int:
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
