"""A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, gated feed-forward layers.

One program serves Llama (Touvron et al., arXiv:2302.13971), Mistral, Qwen and Gemma; the fields of `DecoderConfig` are
their differences.

Shape suffixes, as in `x_BSD`:

    B  batch                 H  query heads              F  feed-forward width
    S  sequence              K  key-value heads, K <= H  V  vocabulary, padded
    D  model width           C  width of a head          1  a broadcast axis
                             G  query heads that share a key-value head, H / K
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.attention_kernels import kernel_note
from jzero.loss import Mean
from jzero.pipeline import vocab_parallel
from jzero.tiling import tiled

from .attention import (
    Carry,
    Decoding,
    Hidden,
    KVCache,
    attend,
    frequencies,
    rope,
    same_segment,
    visible_ST,
)
from .batches import column
from .decoder_config import DecoderConfig
from .families import weights_table
from .lora import FusedLinear, linear
from .moe import METRICS, Mixture
from .vocabulary import check_tokens

ACTIVATIONS = {"silu": nnx.silu, "gelu_tanh": nnx.gelu}


class OffsetRMSNorm(nnx.Module):
    """RMSNorm whose parameter is the scale minus one, as in Gemma; float32 inside."""

    def __init__(self, width: int, epsilon: float):
        self.epsilon, self.scale = epsilon, nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + self.epsilon)
        return (wide * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention; one product makes queries, keys and values.

    With segments, a token attends only to its own segment. Positions need not restart at a segment's start, because
    RoPE encodes distances. cuDNN takes segments as a bias, which costs time: 2 x 4,096 tokens with 32 heads of 64 take
    2.24 ms forward and backward on an H200, and 1.39 ms without segments.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        # A key-value head lies beside its queries, so that an equal cut of K keeps together what belongs together.
        shape, widths = (
            (c.num_kv_heads, c.num_groups + 2, c.head_dim),
            {"q_proj": c.num_groups, "k_proj": 1, "v_proj": 1},
        )
        self.qkv = FusedLinear(
            c.d_model, shape, 1, widths, c.lora, rngs=rngs, use_bias=c.qkv_bias, kernel_init=_normal(c)
        )
        self.out = _linear(c, c.num_heads * c.head_dim, c.d_model, "o_proj", rngs, last=True)
        if c.qk_norm:
            self.q_norm, self.k_norm = (_norm(c, rngs, c.head_dim) for _ in range(2))

    def __call__(
        self, x_BSD: jax.Array, segments_BS: jax.Array | None = None, layer: jax.Array | None = None
    ) -> jax.Array:
        return self.attend_causally(*self.heads(x_BSD, layer), segments_BS, layer)

    def decode(self, x: Decoding, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Attend within a prompt, or from one token to all before it; return (y_BSD, the cache with their keys)."""
        q_BSHC, k_BSKC, v_BSKC = self.heads(x.x_BSD, x.layer, x.columns_S)
        cache = cache.put(k_BSKC, v_BSKC, x.column)
        if x.x_BSD.shape[1] > 1:
            return self.attend_causally(q_BSHC, k_BSKC, v_BSKC, x.segments_BS, x.layer), cache
        T, window = cache.k_BTKC.shape[1], self.config.window
        mask_B11T, is_global = x.visible_B11T(T, window), self.is_global(x.layer)
        if is_global is not None:
            mask_B11T = jnp.where(is_global, x.visible_B11T(T), mask_B11T)
        return self.attend(q_BSHC, *cache, mask_B11T), cache

    def heads(
        self, x_BSD: jax.Array, layer: jax.Array | None, columns_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries [B, S, H, C], keys and values [B, S, K, C]."""
        c = self.config
        q_BSKGC, k_BSK1C, v_BSK1C = self.qkv(x_BSD)
        q_BSHC = q_BSKGC.reshape(*x_BSD.shape[:2], c.num_heads, c.head_dim)
        k_BSKC, v_BSKC = k_BSK1C.squeeze(3), v_BSK1C.squeeze(3)
        if c.qk_norm:
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        frequency, is_global = frequencies(c.head_dim, c.rope_theta, c.rope_scaling), self.is_global(layer)
        if c.local_theta and is_global is not None:
            frequency = jnp.where(is_global, frequency, frequencies(c.head_dim, c.local_theta))
        return rope(q_BSHC, frequency, columns_S), rope(k_BSKC, frequency, columns_S), v_BSKC

    def attend_causally(
        self, q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array,
        segments_BS: jax.Array | None, layer: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """Attend to the past within the row."""
        S, c, is_global = q_BSHC.shape[1], self.config, self.is_global(layer)
        mask_B1SS = same_segment(segments_BS)
        if is_global is None:
            return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, causal=True, window=c.window)
        near_11SS = (visible_ST(S, S, c.window) | is_global)[None, None]
        mask_B1SS = near_11SS if mask_B1SS is None else near_11SS & mask_B1SS
        return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, causal=True)

    def is_global(self, layer: jax.Array | None) -> jax.Array | None:
        """Return whether this layer has no window; None if all layers are alike.

        If only some layers have a window, one program serves all of them, so the layer's index decides.
        """
        c = self.config
        return (
            None if layer is None or c.window is None or c.global_every is None else (layer + 1) % c.global_every == 0
        )

    def attend(
        self, q_BSHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, mask_B1ST: jax.Array | None, **visible: Any
    ) -> jax.Array:
        c = self.config
        scale = None if c.query_scalar is None else c.query_scalar**-0.5
        o_BSHC = attend(
            q_BSHC, k_BTKC, v_BTKC, mask_B1ST,
            choice=c.attention, softcap=c.attention_softcap, scale=scale, **visible,
        )  # fmt: skip
        return self.out(o_BSHC.reshape(*o_BSHC.shape[:2], -1))


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); one product makes gate and up. With silu this is SwiGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.activation, c = ACTIVATIONS[config.activation], config
        widths = {"gate_proj": 1, "up_proj": 1}
        self.gate_up = FusedLinear(
            c.d_model, (2, c.d_ff), 0, widths, c.lora, rngs=rngs, use_bias=False, kernel_init=_normal(c)
        )
        self.down = _linear(c, c.d_ff, c.d_model, "down_proj", rngs, last=True)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_BSF, up_BSF = (part_BS1F.squeeze(2) for part_BS1F in self.gate_up(x_BSD))
        return self.down(self.activation(gate_BSF) * up_BSF)


class Block(nnx.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = _feed_forward(config, rngs)
        self.post_norms, self.tiles = config.post_norms, config.mlp_tiles
        if self.post_norms:
            self.attention_post_norm, self.mlp_post_norm = _norm(config, rngs), _norm(config, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        carry = x if isinstance(x, Carry) else Carry(x)
        x_BSD = carry.x_BSD
        y_BSD = self.attention(self.attention_norm(x_BSD), carry.segments_BS, carry.layer)
        x_BSD, metrics = self.feed_forward(x_BSD, y_BSD, self.tiles)
        if not isinstance(x, Carry):
            return x_BSD
        metrics = jax.tree.map(jnp.add, carry.metrics, metrics)
        return Carry(x_BSD, carry.segments_BS, None if carry.layer is None else carry.layer + 1, metrics)

    def decode(self, x: Decoding, cache: KVCache) -> tuple[Decoding, KVCache]:
        """Run the layer in generation."""
        y_BSD, cache = self.attention.decode(x._replace(x_BSD=self.attention_norm(x.x_BSD)), cache)
        layer = None if x.layer is None else x.layer + 1
        return x._replace(x_BSD=self.feed_forward(x.x_BSD, y_BSD)[0], layer=layer), cache

    def feed_forward(
        self, x_BSD: jax.Array, y_BSD: jax.Array, tiles: int = 1
    ) -> tuple[jax.Array, dict[str, jax.Array] | None]:
        """Add attention's output y_BSD to x_BSD, and then the feed-forward layer's; return its metrics too."""
        x_BSD = x_BSD + (self.attention_post_norm(y_BSD) if self.post_norms else y_BSD)
        y_BSD = tiled(lambda x_BSD: self.mlp(self.mlp_norm(x_BSD)), x_BSD, tiles)
        y_BSD, metrics = y_BSD if isinstance(y_BSD, tuple) else (y_BSD, None)
        return x_BSD + (self.mlp_post_norm(y_BSD) if self.post_norms else y_BSD), metrics


class Decoder(nnx.Module):
    """The decoder as prefix (embedding), stack (blocks) and suffix (norm, head, loss).

    A batch is {"inputs": [B, S] int32, "labels": [B, S] int32}: labels[i] is the token after inputs[i]; negative labels
    are ignored. With "segments" [B, S] int32, from `jzero.data.Packed`, tokens attend only to their own segment.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        self.embed = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.vocab_rows, c.d_model)))

        @nnx.split_rngs(splits=c.num_layers)
        @nnx.vmap
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(c, rngs=rngs)

        self.stack = blocks(rngs)  # each parameter has a leading layer axis
        self.norm = _norm(c, rngs)
        if not c.tied:
            self.head = _linear(c, c.d_model, c.vocab_rows, "lm_head", rngs)

    def prefix(self, batch: dict[str, jax.Array]) -> Hidden:
        x_BSD, layer = self.embedded(column(batch, "inputs", "the decoder")), self.first_layer
        segments_BS = batch.get("segments")
        metrics = {name: jnp.zeros((), jnp.float32) for name in METRICS} if self.has_aux else None
        plain = segments_BS is None and layer is None and metrics is None
        return x_BSD if plain else Carry(x_BSD, segments_BS, layer, metrics)

    def embedded(self, tokens_BS: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x_BSD = vocab_parallel.embed(self.embed[...], tokens_BS)
        return x_BSD * jnp.asarray(self.config.d_model**0.5, x_BSD.dtype) if self.config.embed_scale else x_BSD

    @property
    def first_layer(self) -> jax.Array | None:
        return jnp.int32(0) if self.config.global_every else None

    @property
    def has_aux(self) -> bool:
        """Whether the suffix returns metrics beside the loss."""
        return self.config.mixture is not None

    def suffix(self, x: Hidden, batch: dict[str, jax.Array]) -> Mean | tuple[Mean, dict[str, Any]]:
        """Return the tokens' mean cross-entropy; of a mixture of experts (the loss, its metrics)."""
        loss = self.cross_entropy(x.x_BSD if isinstance(x, Carry) else x, batch)
        if self.config.mixture is None:
            return loss
        assert isinstance(x, Carry) and x.metrics is not None  # noqa: PT018  # the prefix made it
        metrics = {name: total / self.config.num_layers for name, total in x.metrics.items()}
        balance = self.config.mixture.balance * metrics["balance_loss"]
        return Mean(loss.sum + balance * loss.count, loss.count), {"cross_entropy": loss, **metrics}

    def cross_entropy(self, x_BSD: jax.Array, batch: dict[str, jax.Array]) -> Mean:
        x_BSD, c = self.norm(x_BSD), self.config
        with jax.named_scope("head"):
            labels_BS = column(batch, "labels", "the decoder")
            return vocab_parallel.cross_entropy(
                x_BSD, self.head_DV, labels_BS, vocab_size=c.vocab_size, softcap=c.logit_softcap, tiles=c.loss_tiles
            )

    def outputs(self, x: Hidden, batch: Any = None) -> jax.Array:
        """Compute the logits [B, S, vocab_size] in float32 from the stack's output."""
        x_BSD, cap = x.x_BSD if isinstance(x, Carry) else x, self.config.logit_softcap
        logits = vocab_parallel.logits(self.norm(x_BSD), self.head_DV).astype(jnp.float32)
        logits = logits[..., : self.config.vocab_size]
        return cap * jnp.tanh(logits / cap) if cap else logits

    def make_cache(self, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
        """Make a layer's empty cache for generation, see `jzero.model`."""
        return KVCache.empty(rows, length, self.config.num_kv_heads, self.config.head_dim, dtype)

    def decode_prefix(self, tokens_BS: jax.Array, column: int | jax.Array, padding_B: jax.Array | None) -> Decoding:
        return Decoding(self.embedded(tokens_BS), column, padding_B, self.first_layer)

    def decode_suffix(self, x: Decoding) -> jax.Array:
        """Compute the logits [B, vocab_size] of each row's last token."""
        return self.outputs(x.x_BSD[:, -1:])[:, 0]

    def check_batch(self, batch: dict[str, Any]) -> None:
        """Raise a ConfigError for tokens outside the vocabulary, see `jzero.model`."""
        check_tokens(batch, self.config.vocab_size)

    def report_notes(self, dtype: jnp.dtype) -> list[str]:
        """Return the lines for the run report, given the compute dtype."""
        c = self.config
        _, names = weights_table(c)
        return [kernel_note(c.attention, dtype, c.head_dim, c.attention_softcap), *names]

    def weights_layout(self) -> dict[str, Any] | None:
        """Describe the parameters in `transformers`, see `jzero.weights.name_map`; None if no class there has them."""
        return weights_table(self.config)[0]

    def __call__(self, tokens_BS: jax.Array, segments_BS: jax.Array | None = None) -> jax.Array:
        """Compute logits [B, S, vocab_size] in float32, without remat or parallelism: for evaluation and generation."""
        graph, layers = nnx.split(self.stack)
        x = self.prefix({"inputs": tokens_BS} | ({} if segments_BS is None else {"segments": segments_BS}))
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x, layers)
        return self.outputs(x)

    @property
    def head_DV(self) -> jax.Array:
        return self.embed[...].T if self.config.tied else self.head.kernel[...]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def vocabulary(self) -> dict[str, int]:
        """{parameter: its vocabulary dimension}: a pipeline divides these among its stages."""
        return {"embed": 0} if self.config.tied else {"embed": 0, "head/kernel": 1}

    @property
    def divided(self) -> dict[str, dict[str, int]]:
        """{mesh axis: {regular expression: the dimension that it divides}}: heads, feed-forward width, vocabulary.

        Key-value heads are divided together with their queries, gate together with up.
        """
        table = {"qkv/kernel": 1, "attention/out/kernel": 0}
        if self.config.mixture:
            table |= {"mlp/gate_up$": 3, "mlp/down$": 1}
            table |= {"mlp/shared_gate_up": 2, "mlp/shared_down": 0} if self.config.mixture.shared else {}
        else:
            table |= {"gate_up/kernel": 2, "mlp/down/kernel": 0}
        table |= {"qkv/bias": 0} if self.config.qkv_bias else {}
        for name in self.config.lora.target_modules if self.config.lora else ():
            table |= {f"{name}/lora_a": 0} if name in ("o_proj", "down_proj") else {f"{name}/lora_b": 1}
        experts = {"expert": {"mlp/(gate_up|down)$": 0}} if self.config.mixture else {}
        return {"tensor": table | self.vocabulary} | experts

    @property
    def fused_matrices(self) -> dict[str, tuple]:
        """The cuts of the parameters that contain several matrices, see `jzero.model`."""
        if self.config.lora and self.config.lora.quantized:
            return {}  # frozen, so no optimizer sees them
        cuts = {"stack/attention/qkv/kernel": (2, (self.config.num_groups, 1, 1))}
        mixture = self.config.mixture
        if mixture is None:
            return cuts | {"stack/mlp/gate_up/kernel": (1, (1, 1))}
        shared = {"stack/mlp/shared_gate_up": (1, (1, 1))} if mixture.shared else {}
        return cuts | {"stack/mlp/gate_up": (2, (1, 1), 1)} | shared


def _feed_forward(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    if config.mixture is None:
        return GatedMLP(config, rngs=rngs)
    return Mixture(config.mixture, config.d_model, rngs=rngs, init=_normal(config), last=_normal(config, last=True))


def _linear(
    config: DecoderConfig, d_in: int, d_out: int, name: str, rngs: nnx.Rngs, *, last: bool = False
) -> nnx.Linear:
    """Make the product of one module in files; the `last` ones of a residual branch start smaller."""
    return linear(d_in, d_out, name, config.lora, rngs=rngs, use_bias=False, kernel_init=_normal(config, last))


def _normal(config: DecoderConfig, last: bool = False) -> nnx.Initializer:
    return nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)


def _norm(config: DecoderConfig, rngs: nnx.Rngs, width: int | None = None) -> nnx.Module:
    width = width or config.d_model
    if config.norm_offset:
        return OffsetRMSNorm(width, config.norm_eps)
    return nnx.RMSNorm(width, epsilon=config.norm_eps, rngs=rngs)
