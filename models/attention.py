"""Attention of all models: caches, masks, and the product itself; grouped queries, and latents.

Shape suffixes:

    B  batch                 H  query heads                C  width of a head
    S  queries               K  key-value heads, K <= H    G  query heads per key-value head, H / K
    T  keys                  D  model width                F  feed-forward width
    L  a latent's width      R  the rotated dimensions     1  a broadcast axis
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jzero.attention_kernels import FLASH, Attend, attention

from .decoder_config import DecoderConfig
from .lora import MODULES, FusedLinear, LoRALinear
from .norms import query_key_norms, unit_rms
from .rope import Rope, either, frequencies, rope, segment_positions

EPSILON = 1e-6  # of the norms of latents, whatever those of the layers have
Cache = Any  # a layer's: a KVCache, or the latents of latent attention [B, T, L + R], rotated keys behind them


class Carry(NamedTuple):
    """The input and output of a block."""

    x_BSD: jax.Array
    segments_BS: jax.Array | None = None  # of packed documents
    layer: jax.Array | None = None  # the index of the next layer, if layers differ
    metrics: dict[str, jax.Array] | None = None  # of the layers before: sums [], of a mixture of experts

    @property
    def columns_S(self) -> jax.Array | None:
        return None  # stands for 0 to S - 1

    @property
    def positions_BS(self) -> jax.Array:  # of each document from 0; B may be 1
        alone_1S = jnp.arange(self.x_BSD.shape[1])[None]
        return alone_1S if self.segments_BS is None else segment_positions(self.segments_BS)


class KVCache(NamedTuple):
    """A layer's keys and values of all columns: of the prompt, and of the tokens that are still to come."""

    k_BTKC: jax.Array
    v_BTKC: jax.Array


def put(cache: Cache, new: Cache, column: int | jax.Array) -> Cache:
    """Write those of new tokens into the columns from `column` on."""
    return jax.tree.map(lambda t, x: lax.dynamic_update_slice_in_dim(t, x.astype(t.dtype), column, 1), cache, new)


class Decoding(NamedTuple):
    """The input and output of a block in generation: a whole prompt, or one more token of each row."""

    x_BSD: jax.Array
    column: int | jax.Array  # of the first token
    padding_B: jax.Array | None = None  # columns at the left of each row that hold no token
    layer: jax.Array | None = None  # as in Carry

    @property
    def columns_S(self) -> jax.Array:
        return self.column + jnp.arange(self.x_BSD.shape[1])

    @property
    def positions_BS(self) -> jax.Array:  # of each row from 0; padding is 0 too
        return jnp.maximum(self.columns_S[None] - self._start_B1, 0)

    @property
    def _start_B1(self) -> jax.Array:
        return jnp.zeros((1, 1), jnp.int32) if self.padding_B is None else self.padding_B[:, None]

    @property
    def segments_BS(self) -> jax.Array | None:  # 1 for tokens of the prompt, 0 for padding
        return None if self.padding_B is None else (self.columns_S >= self.padding_B[:, None]).astype(jnp.int32)

    def visible_B11T(self, T: int, window: int | None = None, chunk: int | None = None) -> jax.Array:
        """Return which columns of a cache one token sees: all before it, a window of them, or those of its chunk."""
        near_11T = visible_ST(1, T, window, self.column)[None]
        if self.padding_B is not None:
            near_11T = near_11T & (jnp.arange(T) >= self.padding_B[:, None, None])
        if chunk is None:
            return near_11T[:, None]
        chunks_BT = (jnp.arange(T) - self._start_B1) // chunk
        return near_11T[:, None] & (chunks_BT == self.positions_BS // chunk)[:, None, None]


def same_segment(segments_BS: jax.Array | None) -> jax.Array | None:
    """Return the mask [B, 1, S, S] of packed rows: a token attends only to its own segment."""
    return None if segments_BS is None else (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None]


def attend(
    q_BSHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKC: jax.Array,
    mask_B1ST: jax.Array | None = None,  # the keys that a query sees; default: all. B or S may be 1
    *,
    choice: Attend = "auto",
    causal: bool = False,  # query i sees only the keys 0 to i; with keys of earlier calls (S < T), pass a mask instead
    window: int | None = None,  # causal query i sees only the keys after i - window
    scale: float | None = None,  # of the scores; default: C ** -0.5
    softcap: float | None = None,  # bounds the scores: softcap * tanh(score / softcap)
    sinks_KG: jax.Array | None = None,  # one more score of each head, of no key (Xiao et al., arXiv:2309.17453)
    length: int | None = None,  # the positions of a row before its padding
) -> jax.Array:
    """Compute grouped-query attention [B, S, H, C]. With a soft cap or sinks it runs on XLA's kernel, on GPUs too."""
    if softcap is not None or sinks_KG is not None:
        S, T = q_BSHC.shape[1], k_BTKC.shape[1]
        visible_B1ST = visible_ST(S, T, window)[None, None] if causal else jnp.ones((1, 1, S, T), bool)
        visible_B1ST = visible_B1ST if mask_B1ST is None else visible_B1ST & mask_B1ST
        return _in_xla(q_BSHC, k_BTKC, v_BTKC, visible_B1ST, scale, softcap, sinks_KG).astype(q_BSHC.dtype)
    if choice == FLASH and causal and mask_B1ST is not None:  # packed documents, padded prompts
        choice = "auto"
    lengths_B = None if length is None else jnp.full(len(q_BSHC), length, jnp.int32)
    return attention(
        q_BSHC, k_BTKC, v_BTKC, mask=mask_B1ST, scale=scale, is_causal=causal,
        query_seq_lengths=lengths_B, key_value_seq_lengths=lengths_B,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla" if q_BSHC.shape[1] == 1 else choice,  # one token attends to a cache
    )  # fmt: skip


def _in_xla(q_BSHC, k_BTKC, v_BTKC, visible_B1ST, scale, softcap, sinks_KG) -> jax.Array:
    """Compute attention with what jax.nn.dot_product_attention lacks; scores are float32."""
    B, S, H, C = q_BSHC.shape
    K = k_BTKC.shape[2]
    q_BSKGC = q_BSHC.reshape(B, S, K, H // K, C)
    scores_BKGST = jnp.einsum("bskgc,btkc->bkgst", q_BSKGC, k_BTKC, preferred_element_type=jnp.float32)
    scale = C**-0.5 if scale is None else scale
    scores_BKGST = scores_BKGST * scale if softcap is None else softcap * jnp.tanh(scores_BKGST * (scale / softcap))
    scores_BKGST = jnp.where(visible_B1ST[:, :, None], scores_BKGST, -1e30)
    if sinks_KG is None:
        weights_BKGST = jax.nn.softmax(scores_BKGST, axis=-1)
    else:
        sinks_KG11 = sinks_KG.astype(jnp.float32)[..., None, None]
        largest = lax.stop_gradient(jnp.maximum(scores_BKGST.max(-1, keepdims=True), sinks_KG11))
        weights_BKGST = jnp.exp(scores_BKGST - largest)
        weights_BKGST /= weights_BKGST.sum(-1, keepdims=True) + jnp.exp(sinks_KG11 - largest)
    return jnp.einsum("bkgst,btkc->bskgc", weights_BKGST.astype(v_BTKC.dtype), v_BTKC).reshape(B, S, H, -1)


def visible_ST(S: int, T: int, window: int | None = None, first: int | jax.Array = 0) -> jax.Array:
    """Return which keys the queries `first` to `first` + S - 1 see: the past, or the last `window` tokens of it."""
    distance_ST = first + jnp.arange(S)[:, None] - jnp.arange(T)
    return (distance_ST >= 0) & (distance_ST < (T if window is None else window))


class Attention(nnx.Module):
    """Grouped-query attention, in a decoder with a causal mask; one product makes queries, keys and values.

    Positions need not restart at a segment's start, because RoPE encodes distances. cuDNN takes segments as a bias,
    which costs time: 2 x 4,096 tokens with 32 heads of 64 take 2.24 ms forward and backward on an H200, not 1.39 ms.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        # A key-value head lies beside its queries, so that an equal cut of K keeps together what belongs together.
        cut, widths = 1, {"q_proj": c.num_groups, "k_proj": 1, "v_proj": 1}
        shape = c.num_kv_heads, c.num_groups + 2, c.head_dim
        if c.by_part:
            cut, shape = 0, (3, c.num_heads, c.head_dim)
        more: Any = {"rngs": rngs, "use_bias": c.qkv_bias, "kernel_init": initial(c)}
        self.qkv = FusedLinear(c.d_model, shape, cut, widths, c.lora, **more)
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
        cache = put(cache, KVCache(k_BSKC, v_BSKC), x.column)
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
        c, is_global = self.config, flag(self.config.global_layers, layer)
        found = frequencies(c.rotary_width, c.rope_theta, c.rope_scaling, length)
        if c.local_theta and is_global is not None:
            found = either(is_global, found, frequencies(c.rotary_width, c.local_theta))
        has_rope = flag(c.rope_layers, layer)
        return found if has_rope is None else either(has_rope, found, Rope(jnp.zeros_like(found.frequency)))

    def within(self, x: Carry | Decoding, q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array) -> jax.Array:
        S, c = q_BSHC.shape[1], self.config
        mask_B1SS, is_global = same_segment(x.segments_BS), flag(c.global_layers, x.layer)
        if is_global is None and not c.chunked:
            return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, causal=c.causal, window=c.window)
        chunks_BS = x.positions_BS // c.window if c.chunked and c.window else None
        near_B1SS: Any = visible_ST(S, S, c.window)[None, None] if chunks_BS is None else same_segment(chunks_BS)
        near_B1SS = near_B1SS if is_global is None else near_B1SS | is_global
        mask_B1SS = near_B1SS if mask_B1SS is None else near_B1SS & mask_B1SS
        return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, causal=True)

    def attend(
        self, q_BSHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, mask_B1ST: jax.Array | None,
        *, causal: bool = False, window: int | None = None,
    ) -> jax.Array:  # fmt: skip
        """Attend as `attend` does, and multiply the result with the last matrix: [B, S, D]."""
        c, sinks_KG = self.config, self.sinks[...] if self.config.sinks else None
        options: Any = {"choice": c.attention, "scale": c.attention_scale, "softcap": c.attention_softcap}
        options |= {"causal": causal, "window": window, "sinks_KG": sinks_KG, "length": c.row_length}
        return self.out(lax.collapse(attend(q_BSHC, k_BTKC, v_BTKC, mask_B1ST, **options), 2))


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
        T = cache_BTL.shape[1]
        q_BSHC, new_BSL = self.compressed(x, T)
        cache_BTL = put(cache_BTL, new_BSL, x.column)
        if x.x_BSD.shape[1] > 1:
            return self.within(q_BSHC, new_BSL, x.segments_BS), cache_BTL
        m = self.latent
        keys_LHC, values_LHC = jnp.split(self.kv_up.kernel[...].astype(q_BSHC.dtype), [m.plain], axis=-1)
        q_BSHL = jnp.einsum("bshc,lhc->bshl", q_BSHC[..., : m.plain], keys_LHC)
        q_BSHL = jnp.concatenate([q_BSHL, q_BSHC[..., m.plain :]], axis=-1)
        all_BT1L = cache_BTL[:, :, None]
        o_BSHL = attend(q_BSHL, all_BT1L, all_BT1L, x.visible_B11T(T), scale=self.scale)
        o_BSHC = jnp.einsum("bshl,lhc->bshc", o_BSHL[..., : m.rank], values_LHC)
        return self.out(lax.collapse(o_BSHC, 2)), cache_BTL

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
        options: Any = {"choice": self.config.attention, "causal": True, "scale": self.scale}
        return self.out(lax.collapse(attend(q_BSHC, k_BSHC, v_BSHC, same_segment(segments_BS), **options), 2))


def flag(pattern: tuple[bool, ...] | None, layer: jax.Array | None) -> jax.Array | None:
    """Return the layer's value of a repeated pattern, by its index in a program for all; None if all are alike."""
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
