"""Models that look at a model with a layer stack from inside: at what its parts give, and at their gradients.

They follow the model's protocol, so they run like it: in every ZeRO stage, scanned or unrolled, cut into pipeline
stages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jzero.loss import LOSS, nonzero, read_loss
from jzero.model import StackModel

Seen = jax.Array  # [L + 2]: the largest absolute value after the prefix, after each of the L layers, and of the loss


def largest(tree: Any) -> jax.Array:
    """Compute the largest absolute value of the floats in a tree, on one device; NaN if one is NaN.

    >>> float(largest({"x": jnp.array([-2.0, 1.0]), "mask": jnp.array([9])}))
    2.0
    """
    return jnp.stack([jnp.zeros(()), *(jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in floats(tree))]).max()


def finite(tree: Any) -> jax.Array:
    """Return whether all floats in a tree are finite, on all devices; a maximum over devices may lose a NaN.

    >>> bool(finite({"x": jnp.array([1.0, jnp.inf]), "ids": jnp.array([1])}))
    False
    """
    return jnp.stack([jnp.ones((), bool), *(jnp.isfinite(x).all() for x in floats(tree))]).all()


def floats(tree: Any) -> list[jax.Array]:
    """List the leaves that are floats."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)]


def largest_loss(model: Any, value: Any) -> jax.Array:
    """Compute the absolute value of what the model's loss returned for a micro-batch."""
    total, count = read_loss(model, value)[LOSS]
    return jnp.abs(total / nonzero(count))


class _Around:
    """A model around another one, with its parameters, its state and its random numbers."""

    def __init__(self, model: StackModel):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def init(self, rng: jax.Array) -> Any:
        return self._model.init(rng)

    def loss(self, params: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        return self._model.loss(params, batch, rng, **extra)  # for those who trace it

    def _split(self, result: Any) -> tuple[Any, dict[str, Any]]:
        return result if getattr(self._model, "state", ()) else (result, {})

    def _join(self, result: Any, new: dict[str, Any]) -> Any:
        return (result, new) if getattr(self._model, "state", ()) else result


class Probed(_Around):
    """Returns `Seen` in the place of the loss. It travels beside the activations, with the number of the next layer."""

    def __init__(self, model: StackModel, layers: int):
        super().__init__(model)
        self._layers = layers

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        x, new = self._split(self._model.prefix(ends, batch, rng, **extra))
        seen = jnp.zeros(self._layers + 2).at[0].set(largest(x))
        return self._join((x, seen, jnp.ones(())), new)  # a float: pipelines on CPUs sum no integers beside floats

    def block(self, layer: Any, carry: Any, rng: jax.Array | None) -> Any:
        x, seen, number = carry
        x, new = self._split(self._model.block(layer, x, rng))
        return self._join((x, seen.at[number.astype(jnp.int32)].set(largest(x)), number + 1), new)

    def suffix(self, ends: Any, carry: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        x, seen, _ = carry
        value, new = self._split(self._model.suffix(ends, x, batch, rng, **extra))
        return self._join(seen.at[-1].set(largest_loss(self._model, value)), new)


class Tapped(_Around):
    """Marks a layer's gradient with NaN if the gradient of the layer's input is not finite.

    So a layer whose gradient is finite has passed on finite gradients, and the last layer whose gradient is not is the
    first that failed in the backward pass. With `only_suffix` the backward pass ends before the layers.
    """

    def __init__(self, model: StackModel, only_suffix: bool):
        super().__init__(model)
        self._only_suffix = only_suffix

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        return self._model.prefix(ends, batch, rng, **extra)

    def block(self, layer: Any, x: Any, rng: jax.Array | None) -> Any:
        return self._model.block(*_tap(layer, x), rng)

    def suffix(self, ends: Any, x: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        if self._only_suffix:
            ends, x = _tap(ends, jax.lax.stop_gradient(x))
        return self._model.suffix(ends, x, batch, rng, **extra)


@jax.custom_vjp
def _tap(weights: Any, x: Any) -> tuple[Any, Any]:
    """Return both; the gradient of `weights` becomes NaN if that of x is not finite."""
    return weights, x


def _forward(weights: Any, x: Any) -> tuple[tuple[Any, Any], None]:
    return (weights, x), None


def _backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    of_weights, of_x = gradients
    mark = jnp.where(finite([g for g in jax.tree.leaves(of_x) if g.dtype != jax.dtypes.float0]), 0.0, jnp.nan)

    def add(g: Any) -> Any:
        return g if g.dtype == jax.dtypes.float0 else g + mark.astype(g.dtype)

    return jax.tree.map(add, of_weights), of_x


_tap.defvjp(_forward, _backward)
