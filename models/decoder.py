"""A decoder-only transformer: norms, RoPE, grouped-query attention, feed-forward layers.

One program serves Llama (Touvron et al., arXiv:2302.13971) and the other families of models/families.py; the fields of
`DecoderConfig` are their differences.

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
    same_segment,
    visible_ST,
)
from .batches import column
from .blocks import gelu
from .decoder_config import DecoderConfig
from .families import weights_table
from .lora import FusedLinear, linear
from .moe import METRICS, Mixture
from .norms import make_norm, query_key_norms
from .rope import Rope, either, frequencies, rope
from .vocabulary import check_tokens

ACTIVATIONS = {"silu": nnx.silu, "gelu": gelu, "gelu_tanh": nnx.gelu}


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
        self.out = _linear(c, c.num_heads * c.head_dim, c.d_model, "o_proj", rngs, last=True, bias=c.out_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = query_key_norms(c, rngs)

    def __call__(
        self, x_BSD: jax.Array, segments_BS: jax.Array | None = None, layer: jax.Array | None = None
    ) -> jax.Array:
        heads = self.heads(x_BSD, layer, x_BSD.shape[1])
        return self.attend_causally(*heads, segments_BS, layer)

    def decode(self, x: Decoding, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Attend within a prompt, or from one token to all before it; return (y_BSD, the cache with their keys)."""
        T, window = cache.k_BTKC.shape[1], self.config.window
        q_BSHC, k_BSKC, v_BSKC = self.heads(x.x_BSD, x.layer, T, x.columns_S)
        cache = cache.put(k_BSKC, v_BSKC, x.column)
        if x.x_BSD.shape[1] > 1:
            return self.attend_causally(q_BSHC, k_BSKC, v_BSKC, x.segments_BS, x.layer), cache
        mask_B11T, is_global = x.visible_B11T(T, window), flag(self.config.global_layers, x.layer)
        if is_global is not None:
            mask_B11T = jnp.where(is_global, x.visible_B11T(T), mask_B11T)
        return self.attend(q_BSHC, *cache, mask_B11T), cache

    def heads(
        self, x_BSD: jax.Array, layer: jax.Array | None, length: int, columns_S: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute queries [B, S, H, C], keys and values [B, S, K, C], in rows of `length` tokens."""
        c = self.config
        q_BSKGC, k_BSK1C, v_BSK1C = self.qkv(x_BSD)
        if c.qk_norm in ("each", "all"):
            q_BSKGC, k_BSK1C = self.q_norm(q_BSKGC), self.k_norm(k_BSK1C)
        q_BSHC = q_BSKGC.reshape(*x_BSD.shape[:2], c.num_heads, c.head_dim)
        k_BSKC, v_BSKC = k_BSK1C.squeeze(3), v_BSK1C.squeeze(3)
        if c.qk_norm == "shared":
            q_BSHC, k_BSKC = self.q_norm(q_BSHC), self.k_norm(k_BSKC)
        rotary = self.rope(layer, length)
        q_BSHC, k_BSKC = (rope(x, rotary, columns_S, c.interleaved_rope) for x in (q_BSHC, k_BSKC))
        return q_BSHC, k_BSKC, v_BSKC

    def rope(self, layer: jax.Array | None, length: int) -> Rope:
        """Compute the angles of this layer, for rows of `length` tokens."""
        c, is_global = self.config, flag(self.config.global_layers, layer)
        found = frequencies(c.rotary_width, c.rope_theta, c.rope_scaling, length)
        if c.local_theta and is_global is not None:
            found = either(is_global, found, frequencies(c.rotary_width, c.local_theta))
        has_rope = flag(c.rope_layers, layer)
        return found if has_rope is None else either(has_rope, found, Rope(jnp.zeros_like(found.frequency)))

    def attend_causally(
        self, q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array,
        segments_BS: jax.Array | None, layer: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """Attend to the past within the row."""
        S, c = q_BSHC.shape[1], self.config
        mask_B1SS, is_global = same_segment(segments_BS), flag(c.global_layers, layer)
        if is_global is None:
            return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, causal=True, window=c.window)
        near_11SS = (visible_ST(S, S, c.window) | is_global)[None, None]
        mask_B1SS = near_11SS if mask_B1SS is None else near_11SS & mask_B1SS
        return self.attend(q_BSHC, k_BSKC, v_BSKC, mask_B1SS, causal=True)

    def attend(
        self, q_BSHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, mask_B1ST: jax.Array | None, **visible: Any
    ) -> jax.Array:
        c = self.config
        o_BSHC = attend(
            q_BSHC, k_BTKC, v_BTKC, mask_B1ST,
            choice=c.attention, softcap=c.attention_softcap, scale=c.attention_scale, **visible,
        )  # fmt: skip
        return self.out(o_BSHC.reshape(*o_BSHC.shape[:2], -1))


def flag(pattern: tuple[bool, ...] | None, layer: jax.Array | None) -> jax.Array | None:
    """Return the layer's value of a pattern that repeats; None if all layers are alike.

    One program serves layers that differ, so the layer's index decides.
    """
    return None if pattern is None or layer is None else jnp.asarray(pattern)[layer % len(pattern)]


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); one product makes gate and up. With silu this is SwiGLU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.activation, c = ACTIVATIONS[config.activation], config
        widths = {"gate_proj": 1, "up_proj": 1}
        self.gate_up = FusedLinear(
            c.d_model, (2, c.d_ff), 0, widths, c.lora, rngs=rngs, use_bias=c.mlp_bias, kernel_init=_normal(c)
        )
        self.down = _linear(c, c.d_ff, c.d_model, "down_proj", rngs, last=True, bias=c.mlp_bias)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_BSF, up_BSF = (part_BS1F.squeeze(2) for part_BS1F in self.gate_up(x_BSD))
        return self.down(self.activation(gate_BSF) * up_BSF)


class MLP(nnx.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.activation, c = ACTIVATIONS[config.activation], config
        self.up = _linear(c, c.d_model, c.d_ff, "up_proj", rngs, bias=c.mlp_bias)
        self.down = _linear(c, c.d_ff, c.d_model, "down_proj", rngs, last=True, bias=c.mlp_bias)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x_BSD)))


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config, before, after = config, config.norms != "after", config.norms != "before"
        if before:
            self.attention_norm = make_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        if before and config.parallel != "one_norm":
            self.mlp_norm = make_norm(config, rngs)
        self.mlp = _feed_forward(config, rngs)
        if after:
            self.attention_post_norm, self.mlp_post_norm = make_norm(config, rngs), make_norm(config, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        carry = x if isinstance(x, Carry) else Carry(x)
        h_BSD = self.normed("attention_norm", carry.x_BSD)
        y_BSD = self.attention(h_BSD, carry.segments_BS, carry.layer)
        x_BSD, metrics = self.feed_forward(carry.x_BSD, h_BSD, y_BSD, self.config.mlp_tiles)
        if not isinstance(x, Carry):
            return x_BSD
        metrics = jax.tree.map(jnp.add, carry.metrics, metrics)
        return Carry(x_BSD, carry.segments_BS, None if carry.layer is None else carry.layer + 1, metrics)

    def decode(self, x: Decoding, cache: KVCache) -> tuple[Decoding, KVCache]:
        """Run the layer in generation."""
        h_BSD = self.normed("attention_norm", x.x_BSD)
        y_BSD, cache = self.attention.decode(x._replace(x_BSD=h_BSD), cache)
        layer = None if x.layer is None else x.layer + 1
        return x._replace(x_BSD=self.feed_forward(x.x_BSD, h_BSD, y_BSD)[0], layer=layer), cache

    def feed_forward(
        self, x_BSD: jax.Array, h_BSD: jax.Array, y_BSD: jax.Array, tiles: int = 1
    ) -> tuple[jax.Array, dict[str, jax.Array] | None]:
        """Add attention's output y_BSD to x_BSD, and then the feed-forward layer's; return its metrics too.

        Args:
          h_BSD: attention's input.
        """
        parallel = {"one_norm": h_BSD, "two_norms": x_BSD}
        x_BSD = x_BSD + self.scaled(self.normed("attention_post_norm", y_BSD))
        source_BSD = parallel.get(self.config.parallel or "", x_BSD)
        y_BSD = tiled(lambda x_BSD: self.mlp(self.normed("mlp_norm", x_BSD)), source_BSD, tiles)
        y_BSD, metrics = y_BSD if isinstance(y_BSD, tuple) else (y_BSD, None)
        return x_BSD + self.scaled(self.normed("mlp_post_norm", y_BSD)), metrics

    def normed(self, name: str, x_BSD: jax.Array) -> jax.Array:
        """Apply a norm, if this family has it."""
        return getattr(self, name)(x_BSD) if hasattr(self, name) else x_BSD

    def scaled(self, y_BSD: jax.Array) -> jax.Array:
        return _times(y_BSD, self.config.residual_scale)


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
        self.norm = make_norm(c, rngs)
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
        return _times(x_BSD, self.config.embed_scale)

    @property
    def first_layer(self) -> jax.Array | None:
        return jnp.int32(0) if self.config.layers_differ else None

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
        x_BSD, c = self.final(x_BSD), self.config
        with jax.named_scope("head"):
            labels_BS = column(batch, "labels", "the decoder")
            return vocab_parallel.cross_entropy(
                x_BSD, self.head_DV, labels_BS, vocab_size=c.vocab_size, softcap=c.logit_softcap, tiles=c.loss_tiles
            )

    def outputs(self, x: Hidden, batch: Any = None) -> jax.Array:
        """Compute the logits [B, S, vocab_size] in float32 from the stack's output."""
        x_BSD, cap = x.x_BSD if isinstance(x, Carry) else x, self.config.logit_softcap
        logits = vocab_parallel.logits(self.final(x_BSD), self.head_DV).astype(jnp.float32)
        logits = logits[..., : self.config.vocab_size]
        return cap * jnp.tanh(logits / cap) if cap else logits

    def final(self, x_BSD: jax.Array) -> jax.Array:
        """Normalise the stack's output; its product with the head are the logits."""
        return _times(self.norm(x_BSD), self.config.logit_scale)

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
        c, table = self.config, {"qkv/kernel": 1, "qkv/bias": 0, "attention/out/kernel": 0}
        if c.mixture:
            table |= {"mlp/gate_up$": 3, "mlp/down$": 1}
            table |= {"mlp/shared_gate_up": 2, "mlp/shared_down": 0} if c.mixture.shared else {}
        elif c.gated:
            table |= {"gate_up/kernel": 2, "gate_up/bias": 1, "mlp/down/kernel": 0}
        else:
            table |= {"mlp/up/kernel": 1, "mlp/up/bias": 0, "mlp/down/kernel": 0}
        table |= {"attention/[qk]_norm/scale": 0} if c.qk_norm in ("each", "all") else {}
        without = [name for name, has in (("qkv/bias", c.qkv_bias), ("mlp/up/bias", c.mlp_bias)) if not has]
        without += [] if c.mlp_bias else ["gate_up/bias"]
        table = {name: dim for name, dim in table.items() if name not in without}
        for name in c.lora.target_modules if c.lora else ():
            table |= {f"{name}/lora_a": 0} if name in ("o_proj", "down_proj") else {f"{name}/lora_b": 1}
        experts = {"expert": {"mlp/(gate_up|down)$": 0}} if c.mixture else {}
        return {"tensor": table | self.vocabulary} | experts

    @property
    def fused_matrices(self) -> dict[str, tuple]:
        """The cuts of the parameters that contain several matrices, see `jzero.model`."""
        if self.config.lora and self.config.lora.quantized:
            return {}  # frozen, so no optimizer sees them
        cuts = {"stack/attention/qkv/kernel": (2, (self.config.num_groups, 1, 1))}
        mixture = self.config.mixture
        if mixture is None:
            return cuts | ({"stack/mlp/gate_up/kernel": (1, (1, 1))} if self.config.gated else {})
        shared = {"stack/mlp/shared_gate_up": (1, (1, 1))} if mixture.shared else {}
        return cuts | {"stack/mlp/gate_up": (2, (1, 1), 1)} | shared


def _feed_forward(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    if config.mixture is None:
        return (GatedMLP if config.gated else MLP)(config, rngs=rngs)
    return Mixture(config.mixture, config.d_model, rngs=rngs, init=_normal(config), last=_normal(config, last=True))


def _linear(
    config: DecoderConfig, d_in: int, d_out: int, name: str, rngs: nnx.Rngs, *, last: bool = False, bias: bool = False
) -> nnx.Linear:
    """Make the product of one module in files; the `last` ones of a residual branch start smaller."""
    return linear(d_in, d_out, name, config.lora, rngs=rngs, use_bias=bias, kernel_init=_normal(config, last))


def _normal(config: DecoderConfig, last: bool = False) -> nnx.Initializer:
    return nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)


def _times(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)
