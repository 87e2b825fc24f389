"""BERT with its masked-language-model head (Devlin et al., arXiv:1810.04805).

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

from .attention import Carry, Hidden
from .blocks import (
    DIVIDED,
    FUSED,
    BlockConfig,
    check_length,
    gelu,
    linear,
    linear_rows,
    norm,
    norm_rows,
    plain,
    qkv_rows,
    run,
    stacked,
)
from .decoder_config import check_fields, padded
from .downloads import ADVICE, Download, require
from .rope import segment_positions
from .tensor_names import embedding
from .vocabulary import check_tokens


@dataclass(frozen=True)
class BertConfig(BlockConfig):
    """The shape of a BERT; `pad_vocab_to` as in `DecoderConfig`."""

    vocab_size: int = 30522
    max_positions: int = 512
    num_types: int = 2
    pad_vocab_to: int = 1

    causal, pre_norm, activation = False, False, staticmethod(gelu)

    @property
    def vocab_rows(self) -> int:
        return padded(self.vocab_size, self.pad_vocab_to)


def read_config(download: Download, **changes: Any) -> BertConfig:
    """Read the shape from a config.json of `transformers`."""
    check_fields(BertConfig, changes)
    there = download.config
    names = {
        "num_layers": "num_hidden_layers", "d_model": "hidden_size", "num_heads": "num_attention_heads",
        "d_ff": "intermediate_size", "vocab_size": "vocab_size", "max_positions": "max_position_embeddings",
    }  # fmt: skip
    fixed = {
        "hidden_act": "gelu", "tie_word_embeddings": True, "is_decoder": False, "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }  # fmt: skip
    more = {"num_types": there.get("type_vocab_size", 2), "norm_eps": there.get("layer_norm_eps", 1e-12)}
    return BertConfig(**{**require(there, names, fixed), **more, "download": download, **changes})


class Bert(nnx.Module):
    """The model as prefix, stack and suffix.

    A batch is {"inputs": [B, S] int32, "labels": [B, S] int32}: the labels are the original tokens where the inputs are
    masked or replaced, and negative elsewhere. Tokens see only their own "segments" [B, S], if given: 1 for tokens and
    0 for padding, or those of packed documents. "types" [B, S] are the sentences of a pair, default 0.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        table = nnx.initializers.normal(0.02)
        self.embed = nnx.Param(table(rngs.params(), (c.vocab_rows, c.d_model)))
        self.positions = nnx.Param(table(rngs.params(), (c.max_positions, c.d_model)))
        self.types = nnx.Param(table(rngs.params(), (c.num_types, c.d_model)))
        self.embed_norm = norm(c, rngs)
        self.stack = stacked(c, rngs)
        self.head = linear(c.d_model, c.d_model, rngs)
        self.head_norm = norm(c, rngs)
        self.head_bias = nnx.Param(jnp.zeros(c.vocab_rows))

    def prefix(self, batch: dict[str, jax.Array]) -> Hidden:
        tokens_BS, segments_BS = batch["inputs"], batch.get("segments")
        check_length(tokens_BS.shape[1], self.config.max_positions)
        where = jnp.arange(tokens_BS.shape[1]) if segments_BS is None else segment_positions(segments_BS)
        x_BSD = vocab_parallel.embed(self.embed[...], tokens_BS) + self.positions[...][where]
        x_BSD = self.embed_norm(x_BSD + self.types[...][batch.get("types", 0)])
        return x_BSD if segments_BS is None else Carry(x_BSD, segments_BS)

    def suffix(self, x: Hidden, batch: dict[str, jax.Array]) -> Mean:
        """Return the tokens' mean cross-entropy."""
        return vocab_parallel.cross_entropy(
            self.features(plain(x)), self.embed[...].T, batch["labels"], bias_V=self.head_bias[...],
            vocab_size=self.config.vocab_size,
        )  # fmt: skip

    def features(self, x_BSD: jax.Array) -> jax.Array:
        return self.head_norm(gelu(self.head(x_BSD)))

    def __call__(
        self, tokens_BS: jax.Array, segments_BS: jax.Array | None = None, types_BS: jax.Array | None = None
    ) -> jax.Array:
        """Compute logits [B, S, vocab_size] in float32, without remat or parallelism."""
        batch = {"inputs": tokens_BS, "segments": segments_BS, "types": types_BS}
        x_BSD = run(self.stack, self.prefix({key: x for key, x in batch.items() if x is not None}))
        logits = self.features(x_BSD) @ self.embed[...].T + self.head_bias[...]
        return logits.astype(jnp.float32)[..., : self.config.vocab_size]

    def check_batch(self, batch: dict[str, Any]) -> None:
        """Raise a ConfigError for tokens outside the vocabulary, see `jzero.model`."""
        check_tokens(batch, self.config.vocab_size)

    def report_notes(self, dtype: jnp.dtype) -> list[str]:
        return [kernel_note(self.config.attention, dtype, self.config.head_dim)]

    @property
    def vocabulary(self) -> dict[str, int]:
        return {"embed": 0, "head_bias": 0}

    @property
    def divided(self) -> dict[str, dict[str, int]]:
        return {"tensor": {**DIVIDED, **self.vocabulary}}

    @property
    def fused_matrices(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return FUSED

    def weights_layout(self) -> dict[str, Any]:
        """Describe the parameters in `BertForMaskedLM`."""
        c, layer, head = self.config, "bert.encoder.layer.{layer}.", "cls.predictions."
        attention, tables = layer + "attention.", "bert.embeddings."
        rows = [
            *embedding(tables + "word_embeddings.weight", "ends/embed", c.vocab_size, c.vocab_rows),
            {"name": tables + "position_embeddings.weight", "leaf": "ends/positions"},
            {"name": tables + "token_type_embeddings.weight", "leaf": "ends/types"},
            *norm_rows(tables + "LayerNorm", "ends/embed_norm"),
            *qkv_rows((attention + "self.query", attention + "self.key", attention + "self.value"), c.d_model),
            *linear_rows(attention + "output.dense", "stack/attention/out"),
            *norm_rows(attention + "output.LayerNorm", "stack/attention_norm"),
            *linear_rows(layer + "intermediate.dense", "stack/mlp/up"),
            *linear_rows(layer + "output.dense", "stack/mlp/down"),
            *norm_rows(layer + "output.LayerNorm", "stack/mlp_norm"),
            *embedding(head + "bias", "ends/head_bias", c.vocab_size, c.vocab_rows),
            *linear_rows(head + "transform.dense", "ends/head"),
            *norm_rows(head + "transform.LayerNorm", "ends/head_norm"),
        ]
        return {
            "config": {
                "architectures": ["BertForMaskedLM"],
                "model_type": "bert",
                "num_hidden_layers": c.num_layers,
                "hidden_size": c.d_model,
                "num_attention_heads": c.num_heads,
                "intermediate_size": c.d_ff,
                "vocab_size": c.vocab_size,
                "max_position_embeddings": c.max_positions,
                "type_vocab_size": c.num_types,
                "layer_norm_eps": c.norm_eps,
                "hidden_act": "gelu",
                "tie_word_embeddings": True,
            },
            "download": c.download and c.download.table(c.vocab_size),
            "may_differ": ["architectures"],
            "aliases": {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
            "ignored": [
                "bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.*", "bert.embeddings.position_ids"
            ],
            "advice": ADVICE,
            "tensors": rows,
        }  # fmt: skip
