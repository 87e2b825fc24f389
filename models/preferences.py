"""A decoder that learns preferences: direct preference optimization (Rafailov et al., arXiv:2305.18290)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.errors import ConfigError

from .decoder import Decoder
from .decoder_config import DecoderConfig

SIDES = ("chosen", "rejected")


class PreferenceDecoder(Decoder):
    """A decoder whose loss is DPO's. A batch is that of `jzero.data.Pairs` with "reference" [B, 2] besides.

    `beta` says how dear it is to leave the reference, the model before the training.
    """

    def __init__(self, config: DecoderConfig, *, beta: float = 0.1, rngs: nnx.Rngs):
        if config.mixture is not None:
            raise ConfigError("preferences: DPO has no load-balancing loss, so it tunes no mixture of experts")
        super().__init__(config, rngs=rngs)
        self.beta = beta

    def prefix(self, batch: dict[str, Any]) -> Any:
        both = jnp.concatenate([batch[side]["inputs"] for side in SIDES])  # one pass over 2 B rows
        return super().prefix({"inputs": both})

    def check_batch(self, batch: dict[str, Any]) -> None:
        for side in SIDES:
            super().check_batch(batch[side])

    def log_probabilities(self, x: Any, batch: dict[str, Any]) -> jax.Array:
        """Sum the log-probabilities of each reply's tokens: [B, 2], chosen and rejected."""
        labels = jnp.concatenate([batch[side]["labels"] for side in SIDES])

        def row(x: jax.Array, labels: jax.Array) -> jax.Array:
            return -self.cross_entropy(x[None], {"labels": labels[None]}).sum

        return jax.vmap(row)(x.x_BSD, labels).reshape(2, -1).T

    def suffix(self, x: Any, batch: dict[str, Any]) -> Any:
        """Return (the loss, the margin of the rewards and the share of positive ones)."""
        rewards = self.beta * (self.log_probabilities(x, batch) - batch["reference"])
        margins = rewards[:, 0] - rewards[:, 1]
        return -jax.nn.log_sigmoid(margins).mean(), {"margin": margins.mean(), "accuracy": (margins > 0).mean()}
