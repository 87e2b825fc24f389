"""The call of a layer in a stack: what goes from layer to layer, and what every layer gets alike."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# Called instead of a layer: handler(number of the layer, or None if only the order tells, args, kwargs) -> output.
handler: ContextVar[Callable | None] = ContextVar("handler", default=None)

ARRAYS = (jax.Array, np.ndarray, np.generic)
RANDOM = (nnx.Rngs, nnx.RngStream)


class Varying(NamedTuple):
    """An argument that the layer before returns: the n-th of them."""

    n: int


class Constant(NamedTuple):
    """An array that every layer gets alike, such as a mask: the n-th of them."""

    n: int


class Static(NamedTuple):
    """An argument that is no array."""

    value: Any


class Random(NamedTuple):
    """A generator of random keys. Every layer gets its own instead, made from its key."""


def flatten(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Flatten a call's arguments; generators of random keys are leaves."""
    return jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, RANDOM))


@dataclass(frozen=True)
class Call:
    """How every layer of a stack is called.

    Attributes:
      tree: the structure of (args, kwargs).
      arguments: what each of its leaves is.
      outputs: for each varying argument, the leaf of a layer's output that the next layer gets.
    """

    tree: Any
    arguments: tuple[Varying | Constant | Static | Random, ...]
    outputs: tuple[int, ...]

    def pack(self, args: tuple, kwargs: dict[str, Any]) -> LayerInput:
        """Sort the arguments of a call."""
        leaves, _ = flatten(args, kwargs)
        varying, constant = (
            [jnp.asarray(x) for x, kind in zip(leaves, self.arguments, strict=True) if isinstance(kind, which)]
            for which in (Varying, Constant)
        )
        return LayerInput(varying, constant, self)


@partial(jax.tree_util.register_dataclass, data_fields=["varying", "constant"], meta_fields=["call"])
@dataclass(frozen=True)
class LayerInput:
    """The `x` of a model's stack: the arguments of the next layer."""

    varying: list[Any]
    constant: list[Any]
    call: Call

    def arguments(self, rng: jax.Array | None) -> tuple[tuple, dict[str, Any]]:
        """Return (args, kwargs); generators draw from `rng`."""

        def value(kind: Any) -> Any:
            if isinstance(kind, Varying):
                return self.varying[kind.n]
            if isinstance(kind, Constant):
                return self.constant[kind.n]
            if isinstance(kind, Static):
                return kind.value
            return nnx.Rngs(jax.random.key(0) if rng is None else rng)

        return jax.tree.unflatten(self.call.tree, [value(kind) for kind in self.call.arguments])

    def after(self, output: Any) -> LayerInput:
        """Return the arguments of the next layer, from a layer's output."""
        leaves = jax.tree.leaves(output)
        return LayerInput([leaves[i] for i in self.call.outputs], self.constant, self.call)
