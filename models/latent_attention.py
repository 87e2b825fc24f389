"""Latent attention (DeepSeek-AI, arXiv:2405.04434, section 2.1), with a cache of latents.

Shape suffixes are those of models/decoder.py, and L: the latent's width, R: the rotated dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .attention import Decoding, attend, same_segment
from .decoder_attention import initial, linear_of
from .decoder_config import DecoderConfig
from .lora import FusedLinear
from .rope import frequencies, rope

EPSILON = 1e-6  # of the norms of latents, whatever those of the layers have


class LatentAttention(nnx.Module):
    """Causal attention whose keys and values come from one latent of each token, and from a rotated key of all heads.

    In training, and within a prompt, each head's keys and values are computed. One more token does not compute those of
    all tokens before it: the matrices that make them are applied to its queries and to the sum of the latents instead
    (section 2.1.2), so that the latents and rotated keys are the keys and values of one head.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        assert c.latent is not None
        self.latent = m = c.latent
        stretch = c.rope_scaling.latent_scale if c.rope_scaling else 1
        self.scale = (c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale) * stretch
        width, init = m.plain + m.rotated, initial(c)
        if m.query_rank:
            self.q_down = linear_of(c, c.d_model, m.query_rank, "q_a_proj", rngs)
            self.q_norm = nnx.RMSNorm(m.query_rank, epsilon=EPSILON, rngs=rngs)
        name, d_in = ("q_b_proj", m.query_rank) if m.query_rank else ("q_proj", c.d_model)
        shape = (c.num_heads, width)
        self.q_up = FusedLinear(d_in, shape, 1, {name: width}, c.lora, rngs=rngs, use_bias=False, kernel_init=init)
        self.kv_down = linear_of(c, c.d_model, m.rank + m.rotated, "kv_a_proj_with_mqa", rngs)
        self.kv_norm = nnx.RMSNorm(m.rank, epsilon=EPSILON, rngs=rngs)
        shape = (c.num_heads, m.plain + m.value)
        self.kv_up = nnx.LinearGeneral(m.rank, shape, use_bias=False, kernel_init=init, rngs=rngs)
        self.out = linear_of(c, c.num_heads * m.value, c.d_model, "o_proj", rngs, last=True)

    def __call__(
        self, x_BSD: jax.Array, segments_BS: jax.Array | None = None, layer: jax.Array | None = None
    ) -> jax.Array:
        return self.within(*self.compressed(x_BSD, x_BSD.shape[1]), segments_BS)

    def decode(self, x: Decoding, cache_BTL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Attend within a prompt, or from one token to all before it; return (y_BSD, the cache with their latents).

        Args:
          cache_BTL: latents and rotated keys, side by side [B, T, L + R].
        """
        T = cache_BTL.shape[1]
        q_BSHC, new_BSL = self.compressed(x.x_BSD, T, x.columns_S)
        cache_BTL = lax.dynamic_update_slice_in_dim(cache_BTL, new_BSL.astype(cache_BTL.dtype), x.column, 1)
        if x.x_BSD.shape[1] > 1:
            return self.within(q_BSHC, new_BSL, x.segments_BS), cache_BTL
        m = self.latent
        keys_LHC, values_LHC = jnp.split(self.kv_up.kernel[...].astype(q_BSHC.dtype), [m.plain], axis=-1)
        q_BSHL = jnp.einsum("bshc,lhc->bshl", q_BSHC[..., : m.plain], keys_LHC)
        q_BSHL = jnp.concatenate([q_BSHL, q_BSHC[..., m.plain :]], axis=-1)
        all_BT1L = cache_BTL[:, :, None]
        o_BSHL = attend(q_BSHL, all_BT1L, all_BT1L, x.visible_B11T(T), scale=self.scale)
        return self.output(jnp.einsum("bshl,lhc->bshc", o_BSHL[..., : m.rank], values_LHC)), cache_BTL

    def compressed(
        self, x_BSD: jax.Array, length: int, columns_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Compute queries [B, S, H, C], and latents with rotated keys [B, S, L + R], in rows of `length` tokens."""
        c, m = self.config, self.latent
        (q_BSHC,) = self.q_up(self.q_norm(self.q_down(x_BSD)) if m.query_rank else x_BSD)
        latent_BSL, key_BSR = jnp.split(self.kv_down(x_BSD), [m.rank], axis=-1)
        angles = frequencies(m.rotated, c.rope_theta, c.rope_scaling, length)
        q_BSHR = rope(q_BSHC[..., m.plain :], angles, columns_S, c.interleaved_rope)
        key_BSR = rope(key_BSR[:, :, None], angles, columns_S, c.interleaved_rope)[:, :, 0]
        q_BSHC = jnp.concatenate([q_BSHC[..., : m.plain], q_BSHR], axis=-1)
        return q_BSHC, jnp.concatenate([self.kv_norm(latent_BSL), key_BSR], axis=-1)

    def within(self, q_BSHC: jax.Array, latent_BSL: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
        """Attend to the past within the row, with the keys and values of each head."""
        m = self.latent
        latent_BSL, key_BSR = jnp.split(latent_BSL, [m.rank], axis=-1)
        k_BSHC, v_BSHC = jnp.split(self.kv_up(latent_BSL), [m.plain], axis=-1)
        key_BSHR = jnp.broadcast_to(key_BSR[:, :, None], (*k_BSHC.shape[:3], m.rotated))
        k_BSHC = jnp.concatenate([k_BSHC, key_BSHR], axis=-1)
        choice, mask_B1SS = self.config.attention, same_segment(segments_BS)
        return self.output(attend(q_BSHC, k_BSHC, v_BSHC, mask_B1SS, choice=choice, causal=True, scale=self.scale))

    def output(self, o_BSHC: jax.Array) -> jax.Array:
        return self.out(o_BSHC.reshape(*o_BSHC.shape[:2], -1))
