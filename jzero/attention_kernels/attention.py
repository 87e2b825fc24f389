"""Attention by the kernel that suits the program's devices.

Shape suffixes: B batch, S queries, T keys, H query heads, K key-value heads (K <= H), C width of a head.
"""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp

from jzero.attention_kernels.choice import (
    FLASH,
    Attend,
    Kernel,
    absent_gpu,
    flash_attention,
    flash_obstacle,
    kernel_for,
)

QueryKeyValue = tuple[jax.Array, jax.Array, jax.Array]
Given = dict[str, Any]  # bias, mask and lengths, None where there is none


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, mask: jax.Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None, local_window_size: int | tuple[int, int] | None = None,
    implementation: Attend = "auto",
) -> jax.Array:  # fmt: skip
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
      ValueError: another `implementation`, an operand of other dimensions, FlashAttention-3 where it cannot be used.

    >>> q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 8))
    >>> attention(q, k, k, is_causal=True).shape
    (2, 5, 4, 8)
    """
    if implementation not in get_args(Attend):
        raise ValueError(f'implementation = {implementation!r}: must be "auto", "flash_attention_3", "cudnn" or "xla"')
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; must be [rows, sequence, heads, width]")
    (_, S, _, C), dtype, xs = query.shape, query.dtype, (query, key, value)
    is_causal, window = _window(is_causal, local_window_size)
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    given: Given = {"bias": bias, "mask": mask, **lengths}
    ahead = implementation == "auto" and window and window[1]  # which cuDNN does not have
    kernel: Kernel = "xla" if ahead else kernel_for(implementation, dtype, C)
    if kernel == FLASH:
        _check_flash(xs, is_causal and not window and all(x is None for x in given.values()))
        return flash_attention(*xs, C**-0.5 if scale is None else float(scale))
    if kernel == "xla" and all(x.dtype == jnp.float16 for x in xs) and _on_cpu():  # JAX has no such products there
        xs = query.astype(jnp.float32), key.astype(jnp.float32), value.astype(jnp.float32)
    if kernel == "cudnn":
        xs, given = _for_cudnn(xs, given)
    out = jax.nn.dot_product_attention(
        *xs, **given, scale=scale, is_causal=is_causal, local_window_size=window, implementation=kernel
    )
    return out[:, :S].astype(dtype)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu" and absent_gpu() is None


def _check_flash(xs: QueryKeyValue, plain: bool) -> None:
    """Raise a ValueError unless FlashAttention-3 computes this; `plain`: causal, and nothing else is given."""
    query, key, value = xs
    (B, S, H, C), dtype = query.shape, query.dtype
    alike = key.shape == value.shape == (B, S, key.shape[2], C) and key.dtype == value.dtype == dtype
    problem = flash_obstacle(dtype, C)
    if not (plain and alike and H % key.shape[2] == 0):
        problem = (
            "it computes causal attention of as many queries as keys, in one dtype and without bias, mask, lengths and "
            "window"
        )
    if problem:
        raise ValueError(f'implementation = "{FLASH}": {problem}; write "auto"')


def _for_cudnn(xs: QueryKeyValue, given: Given) -> tuple[QueryKeyValue, Given]:
    """Broadcast bias and mask to the full lengths (cuDNN broadcasts only rows and heads); make the lengths even."""
    (B, S), T = xs[0].shape[:2], xs[1].shape[1]
    bias, mask = (None if x is None else _broadcast(x, S, T) for x in (given["bias"], given["mask"]))
    given = {**given, "bias": bias, "mask": mask}
    if not (S % 2 or T % 2):
        return xs, given
    xs = _padded(xs[0], 1), _padded(xs[1], 1), _padded(xs[2], 1)
    if bias is not None:
        given["bias"] = _padded(_padded(bias, 2), 3)
    if mask is not None:  # a row must see something
        given["mask"] = _padded(_padded(mask, 3), 2, fill=True)
    else:  # lengths are cheaper than a mask, which cuDNN takes as a bias
        for name, length in (("query_seq_lengths", S), ("key_value_seq_lengths", T)):
            given[name] = jnp.full(B, length, jnp.int32) if given[name] is None else given[name]
    return xs, given


def _window(is_causal: bool, size: int | tuple[int, int] | None) -> tuple[bool, tuple[int, int] | None]:
    """Return whether attention is causal, and its window; one that does not look ahead is causal, as cuDNN wants it."""
    if size is None:
        return is_causal, None
    before, after = (size, size) if isinstance(size, int) else size
    return (True, (before, 0)) if is_causal or after == 0 else (False, (before, after))


def _broadcast(x: jax.Array, queries: int, keys: int) -> jax.Array:
    x = x.reshape(*(1,) * (4 - x.ndim), *x.shape)
    return jnp.broadcast_to(x, (*x.shape[:2], queries, keys))


def _padded(x: jax.Array, dim: int, fill: float = 0) -> jax.Array:
    """Make a dimension even."""
    widths = [(0, n % 2 if d == dim else 0) for d, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=fill)
