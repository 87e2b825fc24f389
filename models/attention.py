"""Attention for all models: rotary positions, the choice of a kernel, and the product itself.

Shape suffixes:

    B  batch                 H  query heads                C  width of a head
    S  queries               K  key-value heads, K <= H    G  query heads per key-value head, H / K
    T  keys                                                1  a broadcast axis
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.planner.gpus import GPU, GPUS

Attend = Literal["auto", "cudnn", "xla"]
HALF = (jnp.bfloat16, jnp.float16)


class Carry(NamedTuple):
    """What blocks pass on if it is more than x_BSD."""

    x_BSD: jax.Array  # D: model width
    segments_BS: jax.Array | None = None  # of packed documents
    layer: jax.Array | None = None  # the index of the next layer, if layers differ
    metrics: dict[str, jax.Array] | None = None  # of the layers before: sums [], of a mixture of experts


Hidden = jax.Array | Carry


class KVCache(NamedTuple):
    """A layer's keys and values of all columns: of the prompt, and of the tokens that are still to come."""

    k_BTKC: jax.Array
    v_BTKC: jax.Array

    @classmethod
    def empty(cls, rows: int, length: int, heads: int, width: int, dtype: jnp.dtype) -> KVCache:
        return cls(*(jnp.zeros((rows, length, heads, width), dtype) for _ in range(2)))

    def put(self, k_BSKC: jax.Array, v_BSKC: jax.Array, column: int | jax.Array) -> KVCache:
        """Write keys and values into the columns from `column` on."""
        new = (x.astype(there.dtype) for x, there in zip((k_BSKC, v_BSKC), self, strict=True))
        return KVCache(*(lax.dynamic_update_slice_in_dim(t, x, column, 1) for t, x in zip(self, new, strict=True)))


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
    def segments_BS(self) -> jax.Array | None:
        """Return the prompt's segments: 1 for tokens, 0 for padding."""
        return None if self.padding_B is None else (self.columns_S >= self.padding_B[:, None]).astype(jnp.int32)

    def visible_B11T(self, T: int, window: int | None = None) -> jax.Array:
        """Return which columns of a cache one token sees."""
        near_11T = visible_ST(1, T, window, self.column)[None]
        if self.padding_B is not None:
            near_11T = near_11T & (jnp.arange(T) >= self.padding_B[:, None, None])
        return near_11T[:, None]


# ------------------------------------------------------------------------------------------- positions


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of pretraining.

    "linear" divides all by `factor` (Chen et al., arXiv:2306.15595). "llama3" divides those whose wavelength is longer
    than `original / low`, keeps those shorter than `original / high`, and interpolates between (Llama 3.1).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192  # positions in pretraining

    def __call__(self, frequency: jax.Array) -> jax.Array:
        if self.kind == "linear":
            return frequency / self.factor
        turns = self.original * frequency / (2 * np.pi)
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Compute the angles per position [C / 2], float32."""
    half = width // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return scaling(frequency) if scaling else frequency


def rope(x_BSHC: jax.Array, theta: float | jax.Array, positions_BS: jax.Array | None = None) -> jax.Array:
    """Rotate queries or keys by their positions, rotate-half convention (Su et al., arXiv:2104.09864).

    The angles are float32: in half precision, the angles of distant positions would round to the same value.

    Args:
      x_BSHC: queries or keys.
      theta: the base of the frequencies, or the `frequencies` themselves.
      positions_BS: default: 0 to S - 1.
    """
    frequency = theta if isinstance(theta, jax.Array) else frequencies(x_BSHC.shape[-1], theta)
    positions = jnp.arange(x_BSHC.shape[1], dtype=jnp.float32) if positions_BS is None else positions_BS
    angle_S1C = positions.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle_S1C), jnp.sin(angle_S1C)
    a, b = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHC.dtype)


def segment_positions(segments_BS: jax.Array) -> jax.Array:
    """Number the tokens of each segment from 0, for embeddings of absolute positions in packed rows.

    >>> segment_positions(jnp.array([[1, 1, 2, 2, 2, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    index = jnp.arange(segments_BS.shape[1])
    begins = jnp.pad(segments_BS[:, 1:] != segments_BS[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


# ------------------------------------------------------------------------------------------- kernels


def absent_gpu() -> GPU | None:
    """Return the GPU that the program is traced for if this machine has no such GPU: a plan's mesh has others."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.device_kind == jax.devices()[0].device_kind:
        return None
    return next((gpu for gpu in GPUS.values() if gpu.description == device.device_kind), None)


def widest_head() -> int:
    """Return the width of a head that cuDNN's attention supports on the program's GPU; 0 if it does not run there."""
    if planned := absent_gpu():
        return 128 if planned.compute_capability >= (8, 0) else 0  # without a GPU, jax._src.cudnn refuses wider ones
    if jax.default_backend() != "gpu":
        return 0
    capability = tuple(map(int, getattr(jax.devices()[0], "compute_capability", "8.0").split(".")))
    if capability < (8, 0):  # cuDNN has no such kernel for a T4 or a V100
        return 0
    return 256 if capability >= (9, 0) else 128  # as in jax._src.cudnn


def cudnn_obstacle(dtype: jnp.dtype, head_dim: int, widest: int, softcap: float | None = None) -> str | None:
    """Return why cuDNN's fused attention cannot be used, or None.

    Args:
      dtype, head_dim: of the queries.
      widest: see `widest_head`.
      softcap: of the scores.

    >>> cudnn_obstacle(jnp.dtype("bfloat16"), 128, 256, softcap=50.0)
    'cuDNN has no soft cap'
    """
    if softcap is not None:
        return "cuDNN has no soft cap"
    if head_dim % 8:
        return f"cuDNN needs heads of a multiple of 8, not {head_dim}"
    if dtype not in HALF:
        return "cuDNN needs half precision"
    if not widest:
        return "cuDNN needs a GPU of compute capability 8.0 or newer"
    if head_dim > widest:
        return f"cuDNN's heads are at most {widest} wide on this GPU, not {head_dim}"
    return None


def attention_kernel(
    choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None
) -> Literal["cudnn", "xla"]:
    """Resolve "auto" for the program's devices: cuDNN's kernel where it can be used, otherwise XLA's."""
    if choice != "auto":
        return choice
    return "xla" if cudnn_obstacle(dtype, head_dim, widest_head(), softcap) else "cudnn"


def kernel_note(choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None) -> str:
    """Return the line about the kernel for the run report."""
    kernel = attention_kernel(choice, dtype, head_dim, softcap)
    on_gpu = absent_gpu() or jax.default_backend() == "gpu"
    widest = widest_head() if on_gpu else 256  # on simulated devices the reason is plain
    why = cudnn_obstacle(dtype, head_dim, widest, softcap) if choice == "auto" else None
    reason = f": {why}" if why and dtype in HALF else ""
    return f"attention kernel {kernel} (attention={choice!r}, {dtype}){reason}"


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
) -> jax.Array:
    """Compute grouped-query attention [B, S, H, C].

    Args:
      mask_B1ST: the keys that a query sees; default: all. B or S may be 1.
      choice: the kernel.
      causal: query i sees only the keys 0 to i. With keys of earlier calls (S < T), pass a mask instead.
      window: causal query i sees only the keys after i - window.
      scale: of the scores; default: C ** -0.5.
      softcap: bounds the scores: softcap * tanh(score / softcap).
    """
    dtype, (_, S, _, C), T = q_BSHC.dtype, q_BSHC.shape, k_BTKC.shape[1]
    kernel = "xla" if S == 1 else attention_kernel(choice, dtype, C, softcap)  # one token attends to a cache
    if softcap is not None:
        return _soft_capped(q_BSHC, k_BTKC, v_BTKC, mask_B1ST, causal, window, scale, softcap).astype(dtype)
    on_cpu = jax.default_backend() == "cpu" and absent_gpu() is None
    if kernel == "xla" and dtype == jnp.float16 and on_cpu:  # JAX has no such products there
        q_BSHC, k_BTKC, v_BTKC = (x.astype(jnp.float32) for x in (q_BSHC, k_BTKC, v_BTKC))
    if mask_B1ST is not None and kernel == "cudnn":  # which broadcasts only the batch and the heads
        mask_B1ST = jnp.broadcast_to(mask_B1ST, (len(mask_B1ST), 1, S, T))
    run = _even if kernel == "cudnn" and (S % 2 or T % 2) else jax.nn.dot_product_attention
    o_BSHC = run(
        q_BSHC, k_BTKC, v_BTKC, mask=mask_B1ST, scale=scale, is_causal=causal, implementation=kernel,
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
    return o_BSHC.astype(dtype)


def _even(q_BSHC, k_BTKC, v_BTKC, *, mask, **kwargs: Any) -> jax.Array:
    """Run jax.nn.dot_product_attention on even numbers of queries and keys, which cuDNN needs."""
    (B, S), T = q_BSHC.shape[:2], k_BTKC.shape[1]
    padded = [jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q_BSHC, k_BTKC, v_BTKC)]
    if mask is None:  # cheaper than a mask, which cuDNN takes as a bias
        kwargs |= {"query_seq_lengths": jnp.full(B, S, "int32"), "key_value_seq_lengths": jnp.full(B, T, "int32")}
    else:
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, T % 2)))
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, S % 2), (0, 0)), constant_values=True)  # a row must see something
    q_BSHC, k_BTKC, v_BTKC = padded
    return jax.nn.dot_product_attention(q_BSHC, k_BTKC, v_BTKC, mask=mask, **kwargs)[:, :S]


def _soft_capped(q_BSHC, k_BTKC, v_BTKC, mask_B1ST, causal, window, scale, softcap) -> jax.Array:
    """Compute attention with bounded scores, which jax.nn.dot_product_attention lacks; scores are float32."""
    B, S, H, C = q_BSHC.shape
    T, K = k_BTKC.shape[1:3]
    q_BSKGC = q_BSHC.reshape(B, S, K, H // K, C)
    scores_BKGST = jnp.einsum("bskgc,btkc->bkgst", q_BSKGC, k_BTKC, preferred_element_type=jnp.float32)
    scores_BKGST = softcap * jnp.tanh(scores_BKGST * ((C**-0.5 if scale is None else scale) / softcap))
    visible = visible_ST(S, T, window) if causal else jnp.ones((S, T), bool)
    if mask_B1ST is not None:
        visible = visible & mask_B1ST[:, :, None]
    weights_BKGST = jax.nn.softmax(jnp.where(visible, scores_BKGST, -1e30), axis=-1).astype(v_BTKC.dtype)
    return jnp.einsum("bkgst,btkc->bskgc", weights_BKGST, v_BTKC).reshape(B, S, H, C)


def visible_ST(S: int, T: int, window: int | None = None, first: int | jax.Array = 0) -> jax.Array:
    """Return which keys the queries `first` to `first` + S - 1 see: the past, or the last `window` tokens of it."""
    distance_ST = first + jnp.arange(S)[:, None] - jnp.arange(T)
    return (distance_ST >= 0) & (distance_ST < (T if window is None else window))
