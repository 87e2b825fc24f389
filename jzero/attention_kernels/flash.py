"""FlashAttention-3 (Shah et al., arXiv:2407.08608) for Hopper, by the package flash-attn3-jax: the extra `flash`.

Shape suffixes: B batch, S sequence, H query heads, K key-value heads (K <= H), C width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compat import flash_attention_kernels

WIDTH = 128  # of a head: the package's wheels have no other


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash_attention(q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, scale: float) -> jax.Array:
    """Compute causal attention [B, S, H, C] in half precision, with C = `WIDTH`."""
    return _forward(q_BSHC, k_BSKC, v_BSKC, scale)[0]


def _forward(q_BSHC: Any, k_BSKC: Any, v_BSKC: Any, scale: float) -> Any:
    o_BSHC, sums_BHS = _kernels()[0].bind(q_BSHC, k_BSKC, v_BSKC, **_options(scale))
    return o_BSHC, (q_BSHC, k_BSKC, v_BSKC, o_BSHC, sums_BHS)


def _backward(scale: float, kept: Any, gradient_BSHC: Any) -> Any:
    return tuple(_kernels()[1].bind(gradient_BSHC, *kept, **_options(scale)))


flash_attention.defvjp(_forward, _backward)


def _options(scale: float) -> dict[str, Any]:
    # Without a causal mask the backward pass of 0.2.3 is wrong for sequences of a multiple of 128.
    return {"softmax_scale": scale, "is_causal": True, "window_size": (-1, -1)}


def missing() -> str | None:
    """Return why the package cannot be used, or None."""
    try:
        _kernels()
    except ImportError:
        return "FlashAttention-3 needs the extra flash: pip install 'jzero[flash]'"
    return None


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Return the primitives of the forward and the backward pass, `flash_mha_fwd_hlo` and `flash_mha_bwd_hlo`."""
    return flash_attention_kernels(_mapped)


def _mapped(kernel: Any, xs: Sequence[Any], dims: Sequence[int | None], **options: Any) -> tuple[list[Any], list[int]]:
    """Run a kernel with a mapped axis as more rows."""
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    each = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(xs, dims, strict=True)
    ]
    found = kernel.bind(*(x.reshape(-1, *x.shape[2:]) for x in each), **options)
    return [x.reshape(size, -1, *x.shape[1:]) for x in found], [0] * len(found)
