"""BERT with its masked-language-model head (Devlin et al., arXiv:1810.04805).

Shape suffixes: B batch, S sequence, D model width, V vocabulary, padded.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.loss import Mean
from jzero.pipeline import vocab_parallel

from .attention import Carry, linear_of
from .decoder_config import BertConfig
from .norms import make_norm
from .rope import learned_positions
from .transformer import Transformer, gelu, stacked


class Bert(Transformer):
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
        self.embed_norm = make_norm(c, rngs)
        self.stack = stacked([c], c.num_layers, rngs)
        self.head = linear_of(c, c.d_model, c.d_model, "head", rngs, bias=True)
        self.head_norm = make_norm(c, rngs)
        self.head_bias = nnx.Param(jnp.zeros(c.vocab_rows))

    def prefix(self, batch: dict[str, jax.Array]) -> Carry:
        tokens_BS, segments_BS = batch["inputs"], batch.get("segments")
        where = learned_positions(tokens_BS.shape[1], self.config.max_positions, segments_BS)
        x_BSD = vocab_parallel.embed(self.embed[...], tokens_BS) + self.positions[...][where]
        x_BSD = self.embed_norm(x_BSD + self.types[...][batch.get("types", 0)])
        return Carry(x_BSD, segments_BS)

    def suffix(self, x: Carry, batch: dict[str, jax.Array]) -> Mean:
        return vocab_parallel.cross_entropy(
            self.features(x.x_BSD), self.embed[...].T, batch["labels"], bias_V=self.head_bias[...],
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

    @property
    def vocabulary(self) -> dict[str, int]:
        return {"embed": 0, "head_bias": 0}
