"""Attention by the kernel that suits the program's devices.

Shape suffixes: B batch, S queries, T keys, H query heads, K key-value heads (K <= H), C width of a head.
"""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp

from jzero.attention_kernels.choice import FLASH, Attend, absent_gpu, flash_obstacle, kernel_for
from jzero.attention_kernels.flash import flash_attention


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Attend = "auto",
) -> jax.Array:
    """Compute `jax.nn.dot_product_attention` by the kernel that suits the program's devices.

    JAX's own default is XLA's kernel, which keeps all scores. "auto" takes cuDNN's on GPUs of compute capability 8.0 or
    newer, in half precision, with heads of a multiple of 8 up to 128 or 256, and no window ahead of a query; plans for
    absent GPUs do so too. Odd lengths, which cuDNN refuses, are padded. On a mesh with `tensor` or `context`, cuDNN's
    kernel runs on the device's own heads (Ulysses) or around a ring.

    "flash_attention_3", of the extra `flash`, runs on Hopper GPUs: causal attention of as many queries as keys, with
    heads of 128, all in one dtype of half precision, without `bias`, `mask`, lengths and windows, on a mesh without
    `tensor`, `context` and `expert`.

    Args:
      query: [B, S, H, C].
      key, value: [B, T, K, C], with K a divisor of H.
      bias: added to the scores; broadcast to [B or 1, H or 1, S, T].
      mask: the keys that a query sees, bool; broadcast to [B or 1, H or 1, S, T].
      scale: of the scores, a number; default: C ** -0.5.
      is_causal: query i sees only the keys 0 to i.
      query_seq_lengths, key_value_seq_lengths: [B], int32: rows are padded after these.
      local_window_size: how many keys before and after its own position a query sees; a number is both.
      implementation: "auto", "flash_attention_3", "cudnn" or "xla".

    Returns:
      [B, S, H, C], in the dtype of the query.

    Raises:
      ValueError: `implementation` is none of these, an operand has another number of dimensions, or FlashAttention-3
        is asked for and cannot be used.

    >>> q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 8))
    >>> attention(q, k, k, is_causal=True).shape
    (2, 5, 4, 8)
    """
    if implementation not in get_args(Attend):
        raise ValueError(f'implementation = {implementation!r}: must be "auto", "flash_attention_3", "cudnn" or "xla"')
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; must be [rows, sequence, heads, width]")
    (B, S, _, C), T, dtype = query.shape, key.shape[1], query.dtype
    is_causal, window = _window(is_causal, local_window_size)
    kernel = kernel_for(implementation, dtype, C)
    if kernel == FLASH:
        others = (bias, mask, query_seq_lengths, key_value_seq_lengths, window)
        alike = key.shape == value.shape == (B, S, key.shape[2], C) and key.dtype == value.dtype == dtype
        if not (is_causal and alike and query.shape[2] % key.shape[2] == 0 and all(x is None for x in others)):
            why = (
                "it computes causal attention of as many queries as keys, in one dtype and without bias, mask, lengths"
            )
            raise ValueError(f'implementation = "{FLASH}": {why} and window; write "auto"')
        if obstacle := flash_obstacle(dtype, C):
            raise ValueError(f'implementation = "{FLASH}": {obstacle}; write "auto"')
        return flash_attention(query, key, value, C**-0.5 if scale is None else float(scale))
    if implementation == "auto" and window and window[1]:  # which cuDNN does not have
        kernel = "xla"
    on_cpu = jax.default_backend() == "cpu" and absent_gpu() is None
    # JAX has no such products there.
    if kernel == "xla" and on_cpu and dtype == key.dtype == value.dtype == jnp.float16:
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    if kernel == "cudnn":
        # It broadcasts only the rows and the heads.
        bias, mask = (x if x is None else _broadcast(x, S, T) for x in (bias, mask))
        if S % 2 or T % 2:
            query, key, value = (_padded(x, 1) for x in (query, key, value))
            bias = bias if bias is None else _padded(_padded(bias, 2), 3)
            if mask is None:  # lengths are cheaper than a mask, which cuDNN takes as a bias
                query_seq_lengths = _lengths(query_seq_lengths, B, S)
                key_value_seq_lengths = _lengths(key_value_seq_lengths, B, T)
            else:  # a row must see something
                mask = _padded(_padded(mask, 3), 2, fill=True)
    out = jax.nn.dot_product_attention(
        query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=window, implementation=kernel,
    )  # fmt: skip
    return out[:, :S].astype(dtype)


def _window(is_causal: bool, size: int | tuple[int, int] | None) -> tuple[bool, tuple[int, int] | None]:
    """Return whether attention is causal, and its window; one that does not look ahead is causal, as cuDNN wants it."""
    if size is None:
        return is_causal, None
    before, after = (size, size) if isinstance(size, int) else size
    return (True, (before, 0)) if is_causal or after == 0 else (False, (before, after))


def _broadcast(x: jax.Array, queries: int, keys: int) -> jax.Array:
    x = x.reshape(*(1,) * (4 - x.ndim), *x.shape)
    return jnp.broadcast_to(x, (*x.shape[:2], queries, keys))


def _padded(x: jax.Array, dim: int, fill: Any = 0) -> jax.Array:
    """Make a dimension even."""
    widths = [(0, n % 2 if d == dim else 0) for d, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=fill)


def _lengths(given: jax.Array | None, rows: int, length: int) -> jax.Array:
    return jnp.full(rows, length, jnp.int32) if given is None else given
