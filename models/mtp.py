"""Layers that predict tokens further ahead (DeepSeek-AI, arXiv:2412.19437, section 2.2); suffixes as in decoder.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import Carry
from .decoder_attention import linear_of
from .decoder_block import Block
from .decoder_config import DecoderConfig
from .norms import make_norm


class FutureLayer(nnx.Module):
    """One layer more, whose input is made of the state before it and the embedding of a token that comes later."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.embed_norm, self.state_norm = make_norm(config, rngs), make_norm(config, rngs)
        self.join = linear_of(config, 2 * config.d_model, config.d_model, "eh_proj", rngs)
        self.block = Block(config, rngs=rngs)
        self.norm = make_norm(config, rngs)

    def __call__(self, carry: Carry, embedded_BSD: jax.Array) -> Carry:
        both = jnp.concatenate([self.embed_norm(embedded_BSD), self.state_norm(carry.x_BSD)], axis=-1)
        after = self.block(carry._replace(x_BSD=self.join(both)))
        assert isinstance(after, Carry)
        return after._replace(x_BSD=self.norm(after.x_BSD))


def ahead(
    tokens_BS: jax.Array, labels_BS: jax.Array, segments_BS: jax.Array | None, distance: int
) -> tuple[jax.Array, jax.Array]:
    """Return the tokens and labels `distance` columns later; no label (-1) at the end of a row or a document."""

    def moved(x_BS: jax.Array, fill: int) -> jax.Array:
        return jnp.pad(x_BS[:, distance:], ((0, 0), (0, distance)), constant_values=fill)

    later_BS = moved(labels_BS, -1)
    if segments_BS is not None:
        later_BS = jnp.where(moved(segments_BS, -1) == segments_BS, later_BS, -1)
    return moved(tokens_BS, 0), later_BS
