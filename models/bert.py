"""BERT with its masked-language-model head (Devlin et al., arXiv:1810.04805).

Shape suffixes: B batch, S sequence, D model width, V vocabulary, padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.loss import Mean
from jzero.pipeline import vocab_parallel

from .attention import Carry, Hidden
from .decoder_config import GPT_BLOCKS, padded
from .families import Family
from .norms import make_norm
from .rope import learned_positions
from .transformer import Encoder, EncoderConfig, check_tokens, gelu, linear, plain, stacked

ROW = Family(
    "BertForMaskedLM", {**GPT_BLOCKS, "norms": "sum", "activation": "gelu"},
    keys={"vocab_size": "vocab_size", "max_positions": "max_position_embeddings", "num_types": "type_vocab_size"},
    absent={"type_vocab_size": 2},
    needs={
        "model_type": "bert", "hidden_act": "gelu", "tie_word_embeddings": True, "is_decoder": False,
        "add_cross_attention": False, "position_embedding_type": "absolute",
    },
    names={
        "embed": "bert.embeddings.word_embeddings.weight",
        "ends/positions": "bert.embeddings.position_embeddings.weight",
        "ends/types": "bert.embeddings.token_type_embeddings.weight", "ends/embed_norm": "bert.embeddings.LayerNorm",
        "layer": "bert.encoder.layer.{layer}.", "qkv": "attention.self.{part}", "parts": "query key value",
        "attention/out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
        "mlp/up": "intermediate.dense", "mlp/down": "output.dense", "mlp_norm": "output.LayerNorm",
        "ends/head": "cls.predictions.transform.dense", "ends/head_norm": "cls.predictions.transform.LayerNorm",
        "head_bias": "cls.predictions.bias",
    },
    aliases={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
    ignored=(
        "bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.*", "bert.embeddings.position_ids"
    ),
)  # fmt: skip


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The shape of a BERT; `pad_vocab_to` as in `DecoderConfig`."""

    vocab_size: int = 30522
    max_positions: int = 512
    num_types: int = 2
    pad_vocab_to: int = 1

    row = ROW


class Bert(Encoder):
    """The model as prefix, stack and suffix.

    A batch is {"inputs": [B, S] int32, "labels": [B, S] int32}: the labels are the original tokens where the inputs are
    masked or replaced, and negative elsewhere. Tokens see only their own "segments" [B, S], if given: 1 for tokens and
    0 for padding, or those of packed documents. "types" [B, S] are the sentences of a pair, default 0.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        table, rows = nnx.initializers.normal(0.02), padded(config.vocab_size, config.pad_vocab_to)
        self.embed = nnx.Param(table(rngs.params(), (rows, c.d_model)))
        self.positions = nnx.Param(table(rngs.params(), (c.max_positions, c.d_model)))
        self.types = nnx.Param(table(rngs.params(), (c.num_types, c.d_model)))
        self.embed_norm = make_norm(c.block, rngs)
        self.stack = stacked([c.block], c.num_layers, rngs)
        self.head = linear(c.d_model, c.d_model, rngs)
        self.head_norm = make_norm(c.block, rngs)
        self.head_bias = nnx.Param(jnp.zeros(rows))

    def prefix(self, batch: dict[str, jax.Array]) -> Hidden:
        tokens_BS, segments_BS = batch["inputs"], batch.get("segments")
        where = learned_positions(tokens_BS.shape[1], self.config.max_positions, segments_BS)
        x_BSD = vocab_parallel.embed(self.embed[...], tokens_BS) + self.positions[...][where]
        x_BSD = self.embed_norm(x_BSD + self.types[...][batch.get("types", 0)])
        return x_BSD if segments_BS is None else Carry(x_BSD, segments_BS)

    def suffix(self, x: Hidden, batch: dict[str, jax.Array]) -> Mean:
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
        x_BSD = self.through(self.prefix({key: x for key, x in batch.items() if x is not None}))
        logits = self.features(x_BSD) @ self.embed[...].T + self.head_bias[...]
        return logits.astype(jnp.float32)[..., : self.config.vocab_size]

    def check_batch(self, batch: dict[str, Any]) -> None:
        check_tokens(batch, self.config.vocab_size)

    @property
    def vocabulary(self) -> dict[str, int]:
        return {"embed": 0, "head_bias": 0}
