"""Attention for all models: caches, masks, and the product itself.

Shape suffixes:

    B  batch                 H  query heads                C  width of a head
    S  queries               K  key-value heads, K <= H    G  query heads per key-value head, H / K
    T  keys                                                1  a broadcast axis
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.attention_kernels import FLASH, Attend, attention

from .rope import segment_positions


class Carry(NamedTuple):
    """What blocks pass on if it is more than x_BSD."""

    x_BSD: jax.Array  # D: model width
    segments_BS: jax.Array | None = None  # of packed documents
    layer: jax.Array | None = None  # the index of the next layer, if layers differ
    metrics: dict[str, jax.Array] | None = None  # of the layers before: sums [], of a mixture of experts

    @property
    def columns_S(self) -> jax.Array | None:
        """Return None, which stands for 0 to S - 1."""
        return None

    @property
    def positions_BS(self) -> jax.Array:
        """Number the tokens of each document from 0: [B or 1, S]."""
        alone_1S = jnp.arange(self.x_BSD.shape[1])[None]
        return alone_1S if self.segments_BS is None else segment_positions(self.segments_BS)


Hidden = jax.Array | Carry


class KVCache(NamedTuple):
    """A layer's keys and values of all columns: of the prompt, and of the tokens that are still to come."""

    k_BTKC: jax.Array
    v_BTKC: jax.Array

    def put(self, k_BSKC: jax.Array, v_BSKC: jax.Array, column: int | jax.Array) -> KVCache:
        """Write keys and values into the columns from `column` on."""
        pairs = zip(self, (k_BSKC, v_BSKC), strict=True)
        return KVCache(*(lax.dynamic_update_slice_in_dim(t, x.astype(t.dtype), column, 1) for t, x in pairs))


Cache = Any  # a layer's: a KVCache, or the latents of latent attention


class Decoding(NamedTuple):
    """What blocks pass on in generation: a whole prompt, or one more token of each row."""

    x_BSD: jax.Array
    column: int | jax.Array  # of the first token
    padding_B: jax.Array | None = None  # columns at the left of each row that hold no token
    layer: jax.Array | None = None  # as in Carry

    @property
    def columns_S(self) -> jax.Array:
        return self.column + jnp.arange(self.x_BSD.shape[1])

    @property
    def positions_BS(self) -> jax.Array:
        """Number the tokens of each row from 0; padding is 0 too."""
        return jnp.maximum(self.columns_S[None] - self._start_B1, 0)

    @property
    def _start_B1(self) -> jax.Array:
        return jnp.zeros((1, 1), jnp.int32) if self.padding_B is None else self.padding_B[:, None]

    @property
    def segments_BS(self) -> jax.Array | None:
        """Return the prompt's segments: 1 for tokens, 0 for padding."""
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


# ------------------------------------------------------------------------------------------- the product


def same_segment(segments_BS: jax.Array | None) -> jax.Array | None:
    """Return the mask [B, 1, S, S] of packed rows: a token attends only to its own segment."""
    return None if segments_BS is None else (segments_BS[:, :, None] == segments_BS[:, None, :])[:, None]


def attend(
    q_BSHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKC: jax.Array,
    mask_B1ST: jax.Array | None = None,
    *,
    choice: Attend = "auto",
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_KG: jax.Array | None = None,
    length: int | None = None,
) -> jax.Array:
    """Compute grouped-query attention [B, S, H, C]. With a soft cap or sinks it runs on XLA's kernel, on GPUs too.

    Args:
      mask_B1ST: the keys that a query sees; default: all. B or S may be 1.
      choice: the kernel.
      causal: query i sees only the keys 0 to i. With keys of earlier calls (S < T), pass a mask instead.
      window: causal query i sees only the keys after i - window.
      scale: of the scores; default: C ** -0.5.
      softcap: bounds the scores: softcap * tanh(score / softcap).
      sinks_KG: one more score of each head, of no key: the weights of the keys add to less than 1 (Xiao et al.,
        arXiv:2309.17453; GPT-OSS).
      length: all rows are padded after as many positions.
    """
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
