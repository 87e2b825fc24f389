"""A decoder-only transformer: norms, RoPE, grouped-query attention, feed-forward layers.

One program serves Llama (Touvron et al., arXiv:2302.13971) and the other families of models/families.py; the fields of
`DecoderConfig` are their differences.

Shape suffixes are those of models/attention.py, and V: the vocabulary, padded.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.loss import Mean
from jzero.pipeline import vocab_parallel

from .attention import Cache, Carry, Decoding, KVCache, linear_of
from .config_json import weights_table
from .decoder_config import DecoderConfig
from .moe import METRICS
from .norms import make_norm
from .rope import learned_positions
from .transformer import Block, LayerGroup, Transformer, column, stacked, times


class Decoder(Transformer):
    """The decoder as prefix (embedding), stack (blocks) and suffix (norm, head, loss).

    A batch is {"inputs": [B, S] int32, "labels": [B, S] int32}: labels[i] is the token after inputs[i]; negative labels
    are ignored. With "segments" [B, S] int32, from `jzero.data.Packed`, tokens attend only to their own segment.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = c = config
        if c.lora:
            weights_table(c)  # refuses adapters that have no names in files, before there are weights
        self.embed = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.vocab_rows, c.d_model)))
        if c.max_positions:
            self.positions = nnx.Param(nnx.initializers.normal(0.01)(rngs.params(), (c.max_positions, c.d_model)))
        first, group = c.layer_ranges
        if first:
            self.first = LayerGroup(map(c.of_layer, first), rngs=rngs)
        self.stack = stacked([c.of_layer(numbers[0]) for numbers in group], len(group[0]), rngs)
        self.norm = make_norm(c, rngs)
        if not c.tied:
            self.head = linear_of(c, c.d_model, c.vocab_rows, "lm_head", rngs)
        if c.future_layers:
            self.future = nnx.List([FutureLayer(c, rngs=rngs) for _ in range(c.future_layers)])

    def prefix(self, batch: dict[str, Any]) -> Carry:
        tokens_BS, layer, positions = column(batch, "inputs"), self.first_layer, None
        segments_BS = batch.get("segments")
        if self.config.max_positions:
            positions = learned_positions(tokens_BS.shape[1], self.config.max_positions, segments_BS)
        x_BSD = self.embedded(tokens_BS, positions)
        metrics = {name: jnp.zeros((), jnp.float32) for name in METRICS} if self.config.mixture else None
        x = Carry(x_BSD, segments_BS, layer, metrics)
        return self.first(x) if hasattr(self, "first") else x

    def embedded(self, tokens_BS: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        with jax.named_scope("embed"):
            x_BSD = vocab_parallel.embed(self.embed[...], tokens_BS)
            x_BSD = x_BSD if positions is None else x_BSD + self.positions[...][positions]
        return times(x_BSD, self.config.embed_scale)

    @property
    def first_layer(self) -> jax.Array | None:  # its index, if that decides what a layer computes
        c = self.config
        return jnp.int32(0) if c.global_layers or (c.rope_layers and c.has_rope) else None

    @property
    def has_aux(self) -> bool:
        return self.config.mixture is not None or self.config.future_layers > 0

    def suffix(self, x: Carry, batch: dict[str, jax.Array]) -> Mean | tuple[Mean, dict[str, Any]]:
        """Return the tokens' mean cross-entropy; of a mixture, and of tokens further ahead, (the loss, its metrics)."""
        c, loss = self.config, self.cross_entropy(x.x_BSD, batch)
        if not self.has_aux:
            return loss
        total, metrics = loss.sum, dict[str, Any](cross_entropy=loss)
        if c.future_layers:
            future, x = self.future_loss(x, batch)
            total += c.future_weight * future
            metrics["future_loss"] = Mean(future, loss.count)
        if c.mixture and x.metrics:
            layers = c.num_layers - len(c.dense_layers) + c.future_layers
            means = {name: total / layers for name, total in x.metrics.items()}
            total += c.mixture.balance * means["balance_loss"] * loss.count
            metrics |= means
        return Mean(total, loss.count), metrics

    def future_loss(self, carry: Carry, batch: dict[str, jax.Array]) -> tuple[jax.Array, Carry]:
        """Sum the mean of the future layers' losses [], as the main loss over the same count (eq. 24 and 25)."""
        tokens_BS, labels_BS = column(batch, "inputs"), column(batch, "labels")
        losses, carry = [], carry._replace(x_BSD=self.norm(carry.x_BSD))
        for depth, layer in enumerate(self.future):
            tokens, labels = ahead(tokens_BS, labels_BS, carry.segments_BS, depth + 1)
            carry = layer(carry, self.embedded(tokens))
            losses.append(self.loss_of(times(carry.x_BSD, self.config.logit_scale), labels).sum)
        return sum(losses) / len(losses), carry

    def cross_entropy(self, x_BSD: jax.Array, batch: dict[str, jax.Array]) -> Mean:
        return self.loss_of(self.final(x_BSD), column(batch, "labels"))

    def loss_of(self, x_BSD: jax.Array, labels_BS: jax.Array) -> Mean:
        c = self.config
        with jax.named_scope("head"):
            return vocab_parallel.cross_entropy(
                x_BSD, self.head_DV, labels_BS, vocab_size=c.vocab_size, softcap=c.logit_softcap, tiles=c.loss_tiles
            )

    def outputs(self, x: Carry, batch: Any = None) -> jax.Array:
        """Compute the logits [B, S, vocab_size] in float32 from the stack's output."""
        cap = self.config.logit_softcap
        logits = vocab_parallel.logits(self.final(x.x_BSD), self.head_DV).astype(jnp.float32)
        logits = logits[..., : self.config.vocab_size]
        return cap * jnp.tanh(logits / cap) if cap else logits

    def final(self, x_BSD: jax.Array) -> jax.Array:
        return times(self.norm(x_BSD), self.config.logit_scale)

    def make_cache(self, rows: int, length: int, dtype: jnp.dtype) -> Cache:
        if most := self.config.max_positions:
            learned_positions(length, most)  # checks the length
        group = [self._empty(rows, length, dtype) for _ in self.config.layer_ranges[1]]
        return group if len(group) > 1 else group[0]

    def make_prefix_cache(self, rows: int, length: int, dtype: jnp.dtype) -> list[Cache]:
        return [self._empty(rows, length, dtype) for _ in self.config.layer_ranges[0]]

    def _empty(self, rows: int, length: int, dtype: jnp.dtype) -> Cache:
        c, m = self.config, self.config.latent
        shape = (rows, length, m.rank + m.rotated) if m else (rows, length, c.num_kv_heads, c.head_dim)
        return jnp.zeros(shape, dtype) if m else KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def decode_prefix(
        self, tokens_BS: jax.Array, column: int | jax.Array, padding_B: jax.Array | None, cache: Sequence[Cache]
    ) -> tuple[Decoding, Sequence[Cache]]:
        x = Decoding(tokens_BS, column, padding_B, self.first_layer)
        x = x._replace(x_BSD=self.embedded(tokens_BS, x.positions_BS if self.config.max_positions else None))
        return self.first.decode(x, cache) if cache else (x, cache)

    def decode_suffix(self, x: Decoding) -> jax.Array:
        """Compute the logits [B, vocab_size] of each row's last token."""
        return self.outputs(Carry(x.x_BSD[:, -1:]))[:, 0]

    def __call__(self, tokens_BS: jax.Array, segments_BS: jax.Array | None = None) -> jax.Array:
        """Compute logits [B, S, vocab_size] in float32, without remat or parallelism: for evaluation and generation."""
        return self.outputs(Carry(self.through(self.prefix({"inputs": tokens_BS, "segments": segments_BS}))))

    @property
    def head_DV(self) -> jax.Array:
        return self.embed[...].T if self.config.tied else self.head.kernel[...]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def vocabulary(self) -> dict[str, int]:
        return {"embed": 0} if self.config.tied else {"embed": 0, "head/kernel": 1}


class FutureLayer(nnx.Module):
    """A layer that predicts a token further ahead (DeepSeek-AI, arXiv:2412.19437, section 2.2)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.embed_norm, self.state_norm = make_norm(config, rngs), make_norm(config, rngs)
        self.join = linear_of(config, 2 * config.d_model, config.d_model, "eh_proj", rngs)
        self.block = Block(config, rngs=rngs)
        self.norm = make_norm(config, rngs)

    def __call__(self, carry: Carry, embedded_BSD: jax.Array) -> Carry:
        both = jnp.concatenate([self.embed_norm(embedded_BSD), self.state_norm(carry.x_BSD)], axis=-1)
        after = self.block(carry._replace(x_BSD=self.join(both)))
        return after._replace(x_BSD=self.norm(after.x_BSD))


def ahead(
    tokens_BS: jax.Array, labels_BS: jax.Array, segments_BS: jax.Array | None, distance: int
) -> tuple[jax.Array, jax.Array]:
    """Return the tokens and labels `distance` columns later; no label (-1) at the end of a row or a document."""

    def moved(x_BS: jax.Array, fill: int) -> jax.Array:
        return jnp.pad(x_BS[:, distance:], ((0, 0), (0, distance)), constant_values=fill)

    later_BS = moved(labels_BS, -1)
    if segments_BS is not None:
        later_BS = jnp.where(moved(segments_BS, -1) == segments_BS, later_BS, -1)
    return moved(tokens_BS, 0), later_BS
