"""Attention by the kernel that suits the program's devices: cuDNN's where it runs, otherwise XLA's.

Shape suffixes: B batch, S queries, T keys, H query heads, K key-value heads (K <= H), C width of a head.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jzero.planner.gpus import GPU, GPUS

Attend = Literal["auto", "cudnn", "xla"]
HALF = (jnp.bfloat16, jnp.float16)


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

    Args:
      query: [B, S, H, C].
      key, value: [B, T, K, C], with K a divisor of H.
      bias: added to the scores; broadcast to [B or 1, H or 1, S, T].
      mask: the keys that a query sees, bool; broadcast to [B or 1, H or 1, S, T].
      scale: of the scores; default: C ** -0.5.
      is_causal: query i sees only the keys 0 to i.
      query_seq_lengths, key_value_seq_lengths: [B], int32: rows are padded after these.
      local_window_size: how many keys before and after its own position a query sees; a number is both.
      implementation: "auto", "cudnn" or "xla".

    Returns:
      [B, S, H, C], in the dtype of the query.

    Raises:
      ValueError: `implementation` is none of these, or an operand has another number of dimensions.

    >>> q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 8))
    >>> attention(q, k, k, is_causal=True).shape
    (2, 5, 4, 8)
    """
    if implementation not in ("auto", "cudnn", "xla"):
        raise ValueError(f'implementation = {implementation!r}: must be "auto", "cudnn" or "xla"')
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; must be [rows, sequence, heads, width]")
    (B, S, _, C), T, dtype = query.shape, key.shape[1], query.dtype
    is_causal, window = _window(is_causal, local_window_size)
    kernel = kernel_for(implementation, dtype, C)
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


def kernel_for(
    choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None
) -> Literal["cudnn", "xla"]:
    """Resolve "auto" for the program's devices: cuDNN's kernel where it can be used, otherwise XLA's."""
    if choice != "auto":
        return choice
    return "xla" if cudnn_obstacle(dtype, head_dim, widest_head(), softcap) else "cudnn"


def kernel_note(choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None) -> str:
    """Return the line about the kernel for the run report."""
    kernel = kernel_for(choice, dtype, head_dim, softcap)
    on_gpu = absent_gpu() or jax.default_backend() == "gpu"
    widest = widest_head() if on_gpu else 256  # on simulated devices the reason is plain
    why = cudnn_obstacle(dtype, head_dim, widest, softcap) if choice == "auto" else None
    reason = f": {why}" if why and dtype in HALF else ""
    return f"attention kernel {kernel} (attention={choice!r}, {dtype}){reason}"
