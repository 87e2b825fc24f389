"""BERT with its masked-language-model head (Devlin et al., arXiv:1810.04805).

Shape suffixes: B batch, S sequence, D model width, V vocabulary, padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.loss import Mean
from jzero.pipeline import vocab_parallel

from .attention import Carry, Hidden
from .decoder_block import gelu
from .decoder_config import padded
from .encoder import Encoder, EncoderConfig, linear
from .norms import make_norm
from .rope import learned_positions
from .tensor_names import layer_rows, module_rows, padded_rows
from .transformer import check_tokens, plain, stacked

NAMES = {
    "layer": "bert.encoder.layer.{layer}.", "qkv": "attention.self.{part}", "parts": "query key value",
    "out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The shape of a BERT; `pad_vocab_to` as in `DecoderConfig`."""

    vocab_size: int = 30522
    max_positions: int = 512
    num_types: int = 2
    pad_vocab_to: int = 1

    norms, names = "sum", ("bert", "BertForMaskedLM")
    keys = MappingProxyType(
        {"vocab_size": "vocab_size", "max_positions": "max_position_embeddings", "num_types": "type_vocab_size"}
    )
    fixed = MappingProxyType(
        {
            "hidden_act": "gelu", "tie_word_embeddings": True, "is_decoder": False, "add_cross_attention": False,
            "position_embedding_type": "absolute",
        }
    )  # fmt: skip
    absent = MappingProxyType({"type_vocab_size": 2})

    @property
    def vocab_rows(self) -> int:
        return padded(self.vocab_size, self.pad_vocab_to)


class Bert(Encoder):
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
        self.embed_norm = make_norm(c.block, rngs)
        self.stack = stacked([c.block], c.num_layers, rngs)
        self.head = linear(c.d_model, c.d_model, rngs)
        self.head_norm = make_norm(c.block, rngs)
        self.head_bias = nnx.Param(jnp.zeros(c.vocab_rows))

    def prefix(self, batch: dict[str, jax.Array]) -> Hidden:
        tokens_BS, segments_BS = batch["inputs"], batch.get("segments")
        where = learned_positions(tokens_BS.shape[1], self.config.max_positions, segments_BS)
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
        x_BSD = self.through(self.prefix({key: x for key, x in batch.items() if x is not None}))
        logits = self.features(x_BSD) @ self.embed[...].T + self.head_bias[...]
        return logits.astype(jnp.float32)[..., : self.config.vocab_size]

    def check_batch(self, batch: dict[str, Any]) -> None:
        """Raise a ConfigError for tokens outside the vocabulary, see `jzero.model`."""
        check_tokens(batch, self.config.vocab_size)

    @property
    def vocabulary(self) -> dict[str, int]:
        return {"embed": 0, "head_bias": 0}

    def weights_layout(self) -> dict[str, Any]:
        """Describe the parameters in `BertForMaskedLM`."""
        c, head, tables, shapes = self.config, "cls.predictions.", "bert.embeddings.", self.shapes
        rows: list[dict[str, Any]] = [
            *padded_rows(tables + "word_embeddings.weight", "ends/embed", c.vocab_size, shapes),
            {"name": tables + "position_embeddings.weight", "leaf": "ends/positions"},
            {"name": tables + "token_type_embeddings.weight", "leaf": "ends/types"},
            *module_rows(tables + "LayerNorm", "ends/embed_norm", shapes),
            *layer_rows(c.block, NAMES, shapes),
            *padded_rows(head + "bias", "ends/head_bias", c.vocab_size, shapes),
            *module_rows(head + "transform.dense", "ends/head", shapes),
            *module_rows(head + "transform.LayerNorm", "ends/head_norm", shapes),
        ]
        return c.weights_layout(
            rows,
            download=c.download and c.download.table(c.vocab_size),
            aliases={r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
            ignored=[
                "bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.*", "bert.embeddings.position_ids"
            ],
        )  # fmt: skip
