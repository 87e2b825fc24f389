"""Attention of a decoder, with RoPE: grouped-query attention, or latent attention with a cache of latents.

Shape suffixes are those of models/decoder.py, and L: the latent's width, R: the rotated dimensions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .attention import Carry, Decoding, KVCache, attend, same_segment, visible_ST
from .decoder_config import DecoderConfig
from .lora import MODULES, FusedLinear, LoRALinear
from .norms import query_key_norms, unit_rms
from .rope import Rope, either, frequencies, rope

EPSILON = 1e-6  # of the norms of latents, whatever those of the layers have


class Attention(nnx.Module):
    """Grouped-query attention, in a decoder with a causal mask; one product makes queries, keys and values.

    With segments, a token attends only to its own segment. Positions need not restart at a segment's start, because
    RoPE encodes distances. cuDNN takes segments as a bias, which costs time: 2 x 4,096 tokens with 32 heads of 64 take
    2.24 ms forward and backward on an H200, and 1.39 ms without segments.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        # A key-value head lies beside its queries, so that an equal cut of K keeps together what belongs together.
        cut, widths = 1, {"q_proj": c.num_groups, "k_proj": 1, "v_proj": 1}
        shape = c.num_kv_heads, c.num_groups + 2, c.head_dim
        if c.by_part:
            cut, shape = 0, (3, c.num_heads, c.head_dim)
        self.qkv = FusedLinear(
            c.d_model, shape, cut, widths, c.lora, rngs=rngs, use_bias=c.qkv_bias, kernel_init=initial(c)
        )
        self.out = linear_of(c, c.num_heads * c.head_dim, c.d_model, "o_proj", rngs, last=True, bias=c.out_bias)
        if c.sinks:
            self.sinks = nnx.Param(initial(c)(rngs.params(), (c.num_kv_heads, c.num_groups)))
        if c.qk_norm not in (None, "unscaled"):
            self.q_norm, self.k_norm = query_key_norms(c, rngs)

    def __call__(self, x: Carry) -> jax.Array:
        return self.within(x, *self.heads(x, x.x_BSD.shape[1]))

    def decode(self, x: Decoding, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Attend within a prompt, or from one token to all before it; return (y_BSD, the cache with their keys)."""
        T, c = cache.k_BTKC.shape[1], self.config
        q_BSHC, k_BSKC, v_BSKC = self.heads(x, T)
        cache = cache.put(k_BSKC, v_BSKC, x.column)
        if x.x_BSD.shape[1] > 1:
            return self.within(x, q_BSHC, k_BSKC, v_BSKC), cache
        mask_B11T = x.visible_B11T(T, **{"chunk" if c.chunked else "window": c.window})
        is_global = flag(c.global_layers, x.layer)
        if is_global is not None:
            mask_B11T = jnp.where(is_global, x.visible_B11T(T), mask_B11T)
        return self.attend(q_BSHC, *cache, mask_B11T), cache

    def heads(self, x: Carry | Decoding, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries [B, S, H, C], keys and values [B, S, K, C], in rows of `length` tokens."""
        c = self.config
        has_rope = flag(c.rope_layers, x.layer) if c.has_rope else False
        q_BSKGC, k_BSK1C, v_BSK1C = self.qkv(x.x_BSD)
        if c.qk_norm in ("each", "all"):
            q_BSKGC, k_BSK1C = self.q_norm(q_BSKGC), self.k_norm(k_BSK1C)
        if c.by_part:
            q_BSHC, k_BSKC, v_BSKC = (part_BS1HC.squeeze(2) for part_BS1HC in (q_BSKGC, k_BSK1C, v_BSK1C))
        else:
            q_BSHC = q_BSKGC.reshape(*x.x_BSD.shape[:2], c.num_heads, c.head_dim)
            k_BSKC, v_BSKC = k_BSK1C.squeeze(3), v_BSK1C.squeeze(3)
        if c.qk_norm == "shared":
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        if c.has_rope:
            angles, columns_S = self.rope(x.layer, length), x.columns_S
            q_BSHC, k_BSKC = (rope(y, angles, columns_S, c.interleaved_rope) for y in (q_BSHC, k_BSKC))
        if c.qk_norm == "unscaled":  # after RoPE, whose scaling may change the norm (yarn, longrope)
            unit = [unit_rms(y, c.norm_eps).astype(y.dtype) for y in (q_BSHC, k_BSKC)]
            either_of = zip(unit, (q_BSHC, k_BSKC), strict=True)
            q_BSHC, k_BSKC = unit if has_rope is None else (jnp.where(has_rope, u, y) for u, y in either_of)
        if c.temperature:
            strength, floor = c.temperature
            scale_BS = 1 + strength * jnp.log1p(jnp.floor((x.positions_BS + 1) / floor))
            scale_BS = scale_BS if has_rope is None else jnp.where(has_rope, 1, scale_BS)
            q_BSHC = (q_BSHC * scale_BS[..., None, None]).astype(q_BSHC.dtype)
        return q_BSHC, k_BSKC, v_BSKC

    def rope(self, layer: jax.Array | None, length: int) -> Rope:
        """Compute the angles of this layer, for rows of `length` tokens."""
        c, is_global = self.config, flag(self.config.global_layers, layer)
        found = frequencies(c.rotary_width, c.rope_theta, c.rope_scaling, length)
        if c.local_theta and is_global is not None:
            found = either(is_global, found, frequencies(c.rotary_width, c.local_theta))
        has_rope = flag(c.rope_layers, layer)
        return found if has_rope is None else either(has_rope, found, Rope(jnp.zeros_like(found.frequency)))

    def within(self, x: Carry | Decoding, q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array) -> jax.Array:
        """Attend within the row, in a decoder to the past."""
        S, c = q_BSHC.shape[1], self.config
        mask_B1SS, is_global = same_segment(x.segments_BS), flag(c.global_layers, x.layer)
        if is_global is None and not c.chunked:
            visible = {"causal": c.causal, "window": c.window, "length": c.row_length}
            return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, **visible)
        chunks_BS = x.positions_BS // c.window if c.chunked and c.window else None
        near_B1SS: Any = visible_ST(S, S, c.window)[None, None] if chunks_BS is None else same_segment(chunks_BS)
        near_B1SS = near_B1SS if is_global is None else near_B1SS | is_global
        mask_B1SS = near_B1SS if mask_B1SS is None else near_B1SS & mask_B1SS
        return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, causal=True)

    def attend(
        self, q_BSHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, mask_B1ST: jax.Array | None, **visible: Any
    ) -> jax.Array:
        c = self.config
        o_BSHC = attend(
            q_BSHC, k_BTKC, v_BTKC, mask_B1ST,
            choice=c.attention, softcap=c.attention_softcap, scale=c.attention_scale,
            sinks_KG=self.sinks[...] if c.sinks else None, **visible,
        )  # fmt: skip
        return self.out(o_BSHC.reshape(*o_BSHC.shape[:2], -1))


class LatentAttention(nnx.Module):
    """Causal attention whose keys and values come from one latent of each token, and from a rotated key of all heads.

    In training, and within a prompt, each head's keys and values are computed. One more token does not compute those of
    all tokens before it: the matrices that make them are applied to its queries and to the sum of the latents instead,
    so that the latents and rotated keys are the keys and values of one head (DeepSeek-AI, arXiv:2405.04434, section
    2.1.2).
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

    def __call__(self, x: Carry) -> jax.Array:
        return self.within(*self.compressed(x, x.x_BSD.shape[1]), x.segments_BS)

    def decode(self, x: Decoding, cache_BTL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Attend within a prompt, or from one token to all before it; return (y_BSD, the cache with their latents).

        Args:
          cache_BTL: latents and rotated keys, side by side [B, T, L + R].
        """
        T = cache_BTL.shape[1]
        q_BSHC, new_BSL = self.compressed(x, T)
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

    def compressed(self, x: Carry | Decoding, length: int) -> tuple[jax.Array, jax.Array]:
        """Compute queries [B, S, H, C], and latents with rotated keys [B, S, L + R], in rows of `length` tokens."""
        c, m, x_BSD, columns_S = self.config, self.latent, x.x_BSD, x.columns_S
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


def flag(pattern: tuple[bool, ...] | None, layer: jax.Array | None) -> jax.Array | None:
    """Return the layer's value of a pattern that repeats; None if all layers are alike.

    One program serves layers that differ, so the layer's index decides.
    """
    return None if pattern is None or layer is None else jnp.asarray(pattern)[layer % len(pattern)]


def linear_of(
    config: DecoderConfig, d_in: int, d_out: int, name: str, rngs: nnx.Rngs, *, last: bool = False, bias: bool = False
) -> nnx.Linear | LoRALinear:
    """Make the linear layer of one module in files; the `last` ones of a residual branch start smaller."""
    options: Any = {"rngs": rngs, "use_bias": bias, "kernel_init": initial(config, last)}
    lora = config.lora
    if lora is None or name not in (MODULES if lora.quantized else lora.target_modules):
        return nnx.Linear(d_in, d_out, **options)
    return LoRALinear(d_in, (d_out,), 0, {name: d_out}, lora, **options)


def initial(config: DecoderConfig, last: bool = False) -> nnx.Initializer:
    return nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)
