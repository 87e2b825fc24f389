"""Grouped-query attention of a decoder, with RoPE. Shape suffixes are those of models/decoder.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import Decoding, KVCache, attend, same_segment, visible_ST
from .decoder_config import DecoderConfig
from .lora import MODULES, FusedLinear, LoRALinear
from .norms import query_key_norms, unit_rms
from .rope import Rope, either, frequencies, rope, segment_positions


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

    def __call__(
        self, x_BSD: jax.Array, segments_BS: jax.Array | None = None, layer: jax.Array | None = None
    ) -> jax.Array:
        heads = self.heads(x_BSD, layer, x_BSD.shape[1], positions_BS=positions(segments_BS, x_BSD.shape[1]))
        return self.within(*heads, segments_BS, layer)

    def decode(self, x: Decoding, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Attend within a prompt, or from one token to all before it; return (y_BSD, the cache with their keys)."""
        T, c = cache.k_BTKC.shape[1], self.config
        q_BSHC, k_BSKC, v_BSKC = self.heads(x.x_BSD, x.layer, T, x.columns_S, x.positions_BS)
        cache = cache.put(k_BSKC, v_BSKC, x.column)
        if x.x_BSD.shape[1] > 1:
            return self.within(q_BSHC, k_BSKC, v_BSKC, x.segments_BS, x.layer), cache
        mask_B11T, is_global = x.visible_B11T(T, None if c.chunked else c.window), flag(c.global_layers, x.layer)
        if c.chunked and c.window:
            mask_B11T = mask_B11T & x.same_chunk_B11T(T, c.window)
        if is_global is not None:
            mask_B11T = jnp.where(is_global, x.visible_B11T(T), mask_B11T)
        return self.attend(q_BSHC, *cache, mask_B11T), cache

    def heads(
        self, x_BSD: jax.Array, layer: jax.Array | None, length: int, columns_S: jax.Array | None = None,
        positions_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """Compute queries [B, S, H, C], keys and values [B, S, K, C], in rows of `length` tokens.

        Args:
          columns_S: default: 0 to S - 1.
          positions_BS: in the documents, for the temperature.
        """
        c = self.config
        has_rope = flag(c.rope_layers, layer) if c.has_rope else False
        q_BSKGC, k_BSK1C, v_BSK1C = self.qkv(x_BSD)
        if c.qk_norm in ("each", "all"):
            q_BSKGC, k_BSK1C = self.q_norm(q_BSKGC), self.k_norm(k_BSK1C)
        if c.by_part:
            q_BSHC, k_BSKC, v_BSKC = (x_BS1HC.squeeze(2) for x_BS1HC in (q_BSKGC, k_BSK1C, v_BSK1C))
        else:
            q_BSHC = q_BSKGC.reshape(*x_BSD.shape[:2], c.num_heads, c.head_dim)
            k_BSKC, v_BSKC = k_BSK1C.squeeze(3), v_BSK1C.squeeze(3)
        if c.qk_norm == "shared":
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        if c.has_rope:
            rotary = self.rope(layer, length)
            q_BSHC, k_BSKC = (rope(x, rotary, columns_S, c.interleaved_rope) for x in (q_BSHC, k_BSKC))
        if c.qk_norm == "unscaled":  # after RoPE, whose scaling may change the norm (yarn, longrope)
            unit = [unit_rms(x, c.norm_eps).astype(x.dtype) for x in (q_BSHC, k_BSKC)]
            either_of = zip(unit, (q_BSHC, k_BSKC), strict=True)
            q_BSHC, k_BSKC = unit if has_rope is None else (jnp.where(has_rope, u, x) for u, x in either_of)
        if c.temperature and positions_BS is not None:
            strength, floor = c.temperature
            scale_BS = 1 + strength * jnp.log1p(jnp.floor((positions_BS + 1) / floor))
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

    def within(
        self, q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array,
        segments_BS: jax.Array | None, layer: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """Attend within the row, in a decoder to the past."""
        S, c = q_BSHC.shape[1], self.config
        mask_B1SS, is_global = same_segment(segments_BS), flag(c.global_layers, layer)
        if is_global is None and not c.chunked:
            visible = {"causal": c.causal, "window": c.window, "length": c.row_length}
            return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, **visible)
        near_B1SS: Any
        if c.chunked and c.window:
            near_B1SS = same_segment(positions(segments_BS, S) // c.window)
        else:
            near_B1SS = visible_ST(S, S, c.window)[None, None]
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


def positions(segments_BS: jax.Array | None, S: int) -> jax.Array:
    """Number the tokens of each document from 0: [B or 1, S]."""
    return jnp.arange(S)[None] if segments_BS is None else segment_positions(segments_BS)


def flag(pattern: tuple[bool, ...] | None, layer: jax.Array | None) -> jax.Array | None:
    """Return the layer's value of a pattern that repeats; None if all layers are alike.

    One program serves layers that differ, so the layer's index decides.
    """
    return None if pattern is None or layer is None else jnp.asarray(pattern)[layer % len(pattern)]


def linear_of(
    config: DecoderConfig, d_in: int, d_out: int, name: str, rngs: nnx.Rngs, *, last: bool = False, bias: bool = False
) -> nnx.Linear | LoRALinear:
    """Make the product of one module in files; the `last` ones of a residual branch start smaller."""
    options: Any = {"rngs": rngs, "use_bias": bias, "kernel_init": initial(config, last)}
    lora = config.lora
    if lora is None or name not in (MODULES if lora.quantized else lora.target_modules):
        return nnx.Linear(d_in, d_out, **options)
    return LoRALinear(d_in, (d_out,), 0, {name: d_out}, lora, **options)


def initial(config: DecoderConfig, last: bool = False) -> nnx.Initializer:
    return nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)
