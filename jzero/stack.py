"""Run a layer stack: unrolled or scanned, rematerialised, each layer's weights fetched as its ZeRO stage says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jzero.config import Config
from jzero.model import fold
from jzero.remat import Block

# Unrolling wins 5-18 % of the step on GPUs; past this many layers its compile time is no longer small.
UNROLL_LIMIT = 48


def unrolls(config: Config, length: int) -> bool:
    """Whether a stack of `length` layers is unrolled: `stack.unroll`, by default up to `UNROLL_LIMIT` layers."""
    return length <= UNROLL_LIMIT if config.stack.unroll == "auto" else bool(config.stack.unroll)


def run_stack(layer: Block, weights: Any, x: Any, rng: jax.Array | None) -> Any:
    """x through every layer: `layer(weights_l, x, key_l) -> x`.

    `weights` is a list with one tree per layer (unrolled), or one tree whose leaves have a leading layer axis
    (scanned). The keys are those of `model.stack_loss`: layer l draws from `fold(rng, l + 1)`.
    """
    if isinstance(weights, list):
        for index, one in enumerate(weights):
            x = layer(one, x, fold(rng, index + 1))
        return x
    length = jax.tree.leaves(weights)[0].shape[0]

    def body(x: Any, item: Any) -> tuple[Any, None]:
        index, one = item
        return layer(one, x, fold(rng, index + 1)), None

    return jax.lax.scan(body, x, (jnp.arange(length), weights))[0]
