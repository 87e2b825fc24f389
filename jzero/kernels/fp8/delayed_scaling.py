"""Delayed scaling: the largest elements of former steps decide the scales, as in Transformer Engine.

A cast then needs no pass over memory that finds the maximum first: the kernel that casts finds it for later steps.

The maxima leave the backward pass as the "gradient" of an argument. Gradients are summed: over micro-batches, ticks of
a pipeline, devices. So each maximum travels as a one-hot vector of its exponent, and the last place of the sum that is
not zero is that of the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.kernels.fp8.quantized import E4M3, E5M2, amax, exponent_of, power_of_two, scale_of
from jzero.tree import PyTree, named

EXPONENTS = 255  # of finite float32 numbers; a step with another maximum changes nothing

# Bounds before a step has seen an array. Few activations and weights are larger. Gradients of a mean are small, and
# those that underflow hide the gradients of the layers below: numbers from 2^-35 in e5m2 and 2^-26 in e4m3 are normal.
FIRST_ACTIVATION, FIRST_WEIGHT, FIRST_GRADIENT = 2.0**4, 2.0**2, {E5M2: 2.0**-6, E4M3: 2.0**-12}


class GradientSlots(NamedTuple):
    """Places for gradients: that of a weight, and `Delayed.seen`."""

    weight: jax.Array
    seen: jax.Array


Histories = dict[str, jax.Array]
"""For each weight of a layer stack of L layers, by its name, float32 [L, 3, steps], the last step first: powers of two
above the largest activation that it was multiplied with, above the largest gradient of these products, and above its
own largest element; 0: not seen."""

LEAVES = "fp8/"  # how the names of their leaves in a state begin


def initial_history(weight: jax.Array, steps: int) -> jax.Array:
    """Begin the history of a weight [L, ...]."""
    own = bound(exponent_one_hot(jax.vmap(amax)(weight)))
    return jnp.zeros((weight.shape[0], 3, steps), jnp.float32).at[:, 2, 0].set(own)


def scales(history: jax.Array, gradients: jnp.dtype) -> jax.Array:
    """Compute one layer's scales from its history [3, steps]: float32 [3].

    Args:
      gradients: the fp8 dtype of gradients.
    """
    largest = history.max(axis=-1)
    first = jnp.array([FIRST_ACTIVATION, FIRST_GRADIENT[gradients], FIRST_WEIGHT], jnp.float32)
    x, g, w = jnp.where(largest > 0, largest, first)
    return jnp.stack([scale_of(x, E4M3), scale_of(g, gradients), scale_of(w, E4M3)])


def in_turn(prepare: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Let `prepare(layout, master, history)` cast a weight in one layer after the other.

    The layers are parts of one stacked array: XLA would find maxima of some in one kernel and cast others in another,
    and read each of them twice.
    """
    last: dict[str, jax.Array] = {}

    def run(layout: Any, master: jax.Array, history: jax.Array | None) -> tuple[Any, Any]:
        if layout.name in last:
            history, _ = lax.optimization_barrier((history, last[layout.name]))
        diff, nondiff = prepare(layout, master, history)
        if isinstance(diff, GradientSlots):
            last[layout.name] = nondiff.delayed.weight
        return diff, nondiff

    return run


def split_gradients(gradients: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
    """Split gradients, some of them `GradientSlots`, into those of the weights and what was seen, with None elsewhere.

    Args:
      weights: the `Quantized` ones among them have `Delayed.weight`.

    Returns:
      The gradients, and counts [..., 3, EXPONENTS], with the leading axes that leaves have in this form.
    """

    def seen(g: PyTree, w: PyTree) -> jax.Array | None:
        if not isinstance(g, GradientSlots):
            return None
        return jnp.concatenate([g.seen, exponent_one_hot(w.delayed.weight)[..., None, :]], axis=-2)

    def is_leaf(g: PyTree) -> bool:
        return g is None or isinstance(g, GradientSlots)

    own = jax.tree.map(lambda g: g.weight if isinstance(g, GradientSlots) else g, gradients, is_leaf=is_leaf)
    return own, jax.tree.map(seen, gradients, weights, is_leaf=is_leaf)


def advance(histories: Histories, seen: PyTree, axes: tuple[str, ...]) -> Histories:
    """Add what all devices saw in a step; nothing is seen of a weight that was not multiplied in fp8.

    Args:
      seen: this device's counts [L, 3, EXPONENTS], in the form of the parameters.
      axes: of the mesh, along which devices have parts of the same layers, or of their products.
    """
    found = named(seen)
    summed = {
        name: found.get(name, jnp.zeros((*history.shape[:2], EXPONENTS), jnp.float32))
        for name, history in histories.items()
    }
    summed = lax.psum(summed, axes) if axes else summed
    return {
        name: jnp.concatenate([bound(summed[name])[..., None], former[..., :-1]], axis=-1)
        for name, former in histories.items()
    }


def zero_counts() -> jax.Array:
    """Make a `Delayed.seen`."""
    return jnp.zeros((2, EXPONENTS), jnp.float32)


def exponent_one_hot(largest: jax.Array) -> jax.Array:
    """Return a one at the place of each number's exponent: float32 [...] -> float32 [..., EXPONENTS]."""
    return jax.nn.one_hot(exponent_of(largest), EXPONENTS)


def bound(counts: jax.Array) -> jax.Array:
    """Return the power of two above the largest number that was counted; 0 without one, or with zeros alone.

    >>> float(bound(exponent_one_hot(jnp.float32(7.0)) + exponent_one_hot(jnp.float32(3.0))))
    8.0
    """
    last = jnp.max(jnp.where(counts > 0, jnp.arange(EXPONENTS), 0), axis=-1)
    return jnp.where(last > 0, power_of_two(jnp.minimum(last + 1, EXPONENTS - 1)), 0.0)  # a finite one
