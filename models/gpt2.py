"""GPT-2: learned positions, LayerNorm, biases, tied embedding (Radford et al., 2019).

Shape suffixes: B batch, S sequence, D model width, V vocabulary, padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.attention_kernels import kernel_note
from jzero.loss import Mean
from jzero.pipeline import vocab_parallel

from .attention import Carry, Decoding, Hidden, KVCache
from .batches import column
from .blocks import DIVIDED, FUSED, BlockConfig, check_length, linear_rows, norm, norm_rows, plain, run, stacked
from .decoder_config import check_fields, padded
from .downloads import ADVICE, Download, require
from .rope import segment_positions
from .tensor_names import embedding
from .vocabulary import check_tokens


@dataclass(frozen=True)
class GPT2Config(BlockConfig):
    """The shape of a GPT-2; `pad_vocab_to` as in `DecoderConfig`.

    >>> GPT2Config(12, 768, 12, 3072, pad_vocab_to=128).vocab_rows
    50304
    """

    norm_eps: float = 1e-5
    vocab_size: int = 50257
    max_positions: int = 1024
    pad_vocab_to: int = 1

    causal, pre_norm, activation = True, True, staticmethod(nnx.gelu)

    @property
    def vocab_rows(self) -> int:
        return padded(self.vocab_size, self.pad_vocab_to)


def read_config(download: Download, **changes: Any) -> GPT2Config:
    """Read the shape from a config.json of `transformers`."""
    check_fields(GPT2Config, changes)
    there = download.config
    names = {
        "num_layers": "n_layer", "d_model": "n_embd", "num_heads": "n_head", "vocab_size": "vocab_size",
        "max_positions": "n_positions",
    }  # fmt: skip
    fixed = {
        "activation_function": "gelu_new", "tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False, "scale_attn_weights": True,
    }  # fmt: skip
    shape = require(there, names, fixed)
    width = there.get("n_inner") or 4 * shape["d_model"]
    more = {"d_ff": width, "norm_eps": there.get("layer_norm_epsilon", 1e-5), "download": download}
    return GPT2Config(**{**shape, **more, **changes})


class GPT2(nnx.Module):
    """The model as prefix, stack and suffix. A batch is that of `Decoder`; positions restart with each segment."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = c = config
        self.embed = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.vocab_rows, c.d_model)))
        self.positions = nnx.Param(nnx.initializers.normal(0.01)(rngs.params(), (c.max_positions, c.d_model)))
        self.stack = stacked(c, rngs)
        self.norm = norm(c, rngs)

    def prefix(self, batch: dict[str, jax.Array]) -> Hidden:
        tokens_BS = column(batch, "inputs", "GPT-2")
        S, segments_BS = tokens_BS.shape[1], batch.get("segments")
        check_length(S, self.config.max_positions)
        where = jnp.arange(S) if segments_BS is None else segment_positions(segments_BS)
        with jax.named_scope("embed"):
            x_BSD = vocab_parallel.embed(self.embed[...], tokens_BS) + self.positions[...][where]
        return x_BSD if segments_BS is None else Carry(x_BSD, segments_BS)

    def suffix(self, x: Hidden, batch: dict[str, jax.Array]) -> Mean:
        """Return the tokens' mean cross-entropy."""
        x_BSD, size = self.norm(plain(x)), self.config.vocab_size
        with jax.named_scope("head"):
            labels_BS = column(batch, "labels", "GPT-2")
            return vocab_parallel.cross_entropy(x_BSD, self.embed[...].T, labels_BS, vocab_size=size)

    def __call__(self, tokens_BS: jax.Array, segments_BS: jax.Array | None = None) -> jax.Array:
        """Compute logits [B, S, vocab_size] in float32, without remat or parallelism."""
        batch = {"inputs": tokens_BS} | ({} if segments_BS is None else {"segments": segments_BS})
        return self.outputs(run(self.stack, self.prefix(batch)))

    def outputs(self, x: Hidden, batch: Any = None) -> jax.Array:
        """Compute the logits [B, S, vocab_size] in float32 from the stack's output."""
        logits = vocab_parallel.logits(self.norm(plain(x)), self.embed[...].T)
        return logits.astype(jnp.float32)[..., : self.config.vocab_size]

    def make_cache(self, rows: int, length: int, dtype: jnp.dtype) -> KVCache:
        """Make a layer's empty cache for generation, see `jzero.model`."""
        check_length(length, self.config.max_positions)
        return KVCache.empty(rows, length, self.config.num_heads, self.config.head_dim, dtype)

    def decode_prefix(self, tokens_BS: jax.Array, column: int | jax.Array, padding_B: jax.Array | None) -> Decoding:
        x = Decoding(vocab_parallel.embed(self.embed[...], tokens_BS), column, padding_B)
        where = x.columns_S if padding_B is None else jnp.maximum(x.columns_S - padding_B[:, None], 0)
        return x._replace(x_BSD=x.x_BSD + self.positions[...][where])

    def decode_suffix(self, x: Decoding) -> jax.Array:
        """Compute the logits [B, vocab_size] of each row's last token."""
        return self.outputs(x.x_BSD[:, -1:])[:, 0]

    def check_batch(self, batch: dict[str, Any]) -> None:
        """Raise a ConfigError for tokens outside the vocabulary, see `jzero.model`."""
        check_tokens(batch, self.config.vocab_size)

    def report_notes(self, dtype: jnp.dtype) -> list[str]:
        return [kernel_note(self.config.attention, dtype, self.config.head_dim)]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def vocabulary(self) -> dict[str, int]:
        return {"embed": 0}

    @property
    def divided(self) -> dict[str, dict[str, int]]:
        return {"tensor": {**DIVIDED, **self.vocabulary}}

    @property
    def fused_matrices(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return FUSED

    def weights_layout(self) -> dict[str, Any]:
        """Describe the parameters in `GPT2LMHeadModel`, whose linear layers are stored as here, [in, out]."""
        c, layer = self.config, "transformer.h.{layer}."
        linears = {"attn.c_proj": "attention/out", "mlp.c_fc": "mlp/up", "mlp.c_proj": "mlp/down"}
        qkv, width = {"name": layer + "attn.c_attn.weight", "leaf": "stack/attention/qkv/kernel"}, 3 * c.d_model
        rows = [
            *embedding("transformer.wte.weight", "ends/embed", c.vocab_size, c.vocab_rows),
            {"name": "transformer.wpe.weight", "leaf": "ends/positions"},
            {**qkv, "reshape": [c.d_model, width]},
            {"name": layer + "attn.c_attn.bias", "leaf": "stack/attention/qkv/bias", "reshape": [width]},
            *norm_rows(layer + "ln_1", "stack/attention_norm"),
            *norm_rows(layer + "ln_2", "stack/mlp_norm"),
        ]
        for name, leaf in linears.items():
            rows += linear_rows(layer + name, f"stack/{leaf}", transposed=False)
        return {
            "config": {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "n_layer": c.num_layers,
                "n_embd": c.d_model,
                "n_head": c.num_heads,
                "n_inner": c.d_ff,
                "n_positions": c.max_positions,
                "vocab_size": c.vocab_size,
                "layer_norm_epsilon": c.norm_eps,
                "activation_function": "gelu_new",
                "tie_word_embeddings": True,
                **({} if c.download else {"bos_token_id": None, "eos_token_id": None}),
            },
            "download": c.download and c.download.table(c.vocab_size),
            "may_differ": ["architectures", "n_inner", "bos_token_id", "eos_token_id"],  # n_inner: null is 4 * n_embd
            "aliases": {r"^(h\.|wte\.|wpe\.|ln_f\.)": r"transformer.\1"},  # names of the first downloads
            "ignored": ["transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias", "lm_head.weight"],
            "advice": ADVICE,
            "tensors": [*rows, *norm_rows("transformer.ln_f", "ends/norm")],
        }
