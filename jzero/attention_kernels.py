"""Attention by the kernel that suits the program's devices.

Shape suffixes: B batch, S queries, T keys, H query heads, K key-value heads (K <= H), C width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jzero._compat.kernels import causal_cudnn_attention, cudnn_version, flash_attention_kernels
from jzero.errors import install_command
from jzero.mesh import CONTEXT, EXPERT, TENSOR
from jzero.planner.gpus import GPU, GPUS

QueryKeyValue = tuple[jax.Array, jax.Array, jax.Array]
Given = dict[str, Any]  # bias, mask and lengths, None where there is none


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, mask: jax.Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None, local_window_size: int | tuple[int, int] | None = None,
    implementation: Attend = "auto",
) -> jax.Array:  # fmt: skip
    """Compute `jax.nn.dot_product_attention` by the kernel that suits the program's devices.

    JAX's own default is XLA's kernel, which keeps all scores. "auto" takes FlashAttention-3 where it runs, otherwise
    cuDNN's on GPUs of compute capability 8.0 or newer, in half precision, with heads of a multiple of 8 up to 128 or
    256, and no window ahead of a query. Plans for absent GPUs take cuDNN's: which packages are there is unknown. Odd
    lengths, which cuDNN refuses, are padded. On a mesh with `tensor` or `context`, cuDNN's kernel runs on the device's
    own heads (Ulysses) or around a ring.

    "flash_attention_3", of the extra `flash`, runs on Hopper GPUs: causal attention of as many queries as keys, with
    heads of 128, all in one dtype of half precision, without `bias`, `mask`, lengths and windows, on a mesh without
    `tensor`, `context` and `expert`.

    Args:
      query: [B, S, H, C].
      key, value: [B, T, K, C], with K a divisor of H; values may be narrower.
      bias: added to the scores; broadcast to [B or 1, H or 1, S, T].
      mask: the keys that a query sees, bool; broadcast to [B or 1, H or 1, S, T].
      scale: of the scores, a number; default: C ** -0.5.
      is_causal: query i sees only the keys 0 to i.
      query_seq_lengths, key_value_seq_lengths: [B], int32: rows are padded after these.
      local_window_size: how many keys before and after its own position a query sees; a number is both.
      implementation: "auto", "flash_attention_3", "cudnn" or "xla".

    Returns:
      [B, S, H, C], or as wide as the values, in the dtype of the query.

    Raises:
      ValueError: another `implementation`, an operand of other dimensions, values wider than keys, FlashAttention-3
        where it cannot be used.

    >>> q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 8))
    >>> attention(q, k, k, is_causal=True).shape
    (2, 5, 4, 8)
    """
    _check_operands(query, key, value, implementation)
    (B, S, H, C), wide = query.shape, value.shape[-1]
    is_causal, window = _window(is_causal, local_window_size)
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    given: Given = {"bias": bias, "mask": mask, **lengths}
    ahead = implementation == "auto" and window and window[1]  # which cuDNN does not have
    plain = is_causal and not window and all(x is None for x in given.values())
    alike = S > 0 and H % key.shape[2] == 0 and key.shape == value.shape == (B, S, key.shape[2], C)
    serves = plain and alike and query.dtype == key.dtype == value.dtype and not isinstance(scale, jax.Array)
    kernel: Kernel = "xla" if ahead else kernel_for(implementation, query.dtype, C, causal=serves)
    number: Any = C**-0.5 if scale is None else scale
    if kernel == FLASH:
        _check_flash(query, serves)
        return flash_attention(query, key, value, float(number))
    if wide == C:
        return _by(kernel, (query, key, value), given, scale, is_causal, window)
    if kernel == "cudnn" and plain and takes_narrow_values(S, key.shape[1]):
        return causal_cudnn_attention(query, key, value, float(number))
    value = jnp.pad(value, [(0, 0)] * 3 + [(0, C - wide)])
    return _by(kernel, (query, key, value), given, scale, is_causal, window)[..., :wide]


def _check_operands(query: jax.Array, key: jax.Array, value: jax.Array, implementation: str) -> None:
    if implementation not in get_args(Attend):
        raise ValueError(f'implementation = {implementation!r}: must be "auto", "flash_attention_3", "cudnn" or "xla"')
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; must be [rows, sequence, heads, width]")
    if value.shape[-1] > query.shape[-1]:
        raise ValueError(f"value has shape {value.shape}; must be at most as wide as query, {query.shape[-1]}")


def _by(
    kernel: Literal["cudnn", "xla"], xs: QueryKeyValue, given: Given, scale: float | None, is_causal: bool,
    window: tuple[int, int] | None,
) -> jax.Array:  # fmt: skip
    """Compute attention by one kernel of `jax.nn`."""
    S, dtype = xs[0].shape[1], xs[0].dtype
    is_float16 = kernel == "xla" and all(x.dtype == jnp.float16 for x in xs)
    if is_float16 and jax.default_backend() == "cpu" and absent_gpu() is None:  # JAX has no such products there
        xs = xs[0].astype(jnp.float32), xs[1].astype(jnp.float32), xs[2].astype(jnp.float32)
    if kernel == "cudnn":
        xs, given = _for_cudnn(xs, given)
    out = jax.nn.dot_product_attention(
        *xs, **given, scale=scale, is_causal=is_causal, local_window_size=window, implementation=kernel
    )
    return out[:, :S].astype(dtype)


def _check_flash(query: jax.Array, serves: bool) -> None:
    """Raise a ValueError unless FlashAttention-3 computes this; `serves`: causal, alike, and nothing else is given."""
    problem = flash_obstacle(query.dtype, query.shape[3])
    if not serves:
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


FLASH: Literal["flash_attention_3"] = "flash_attention_3"  # as Hugging Face's attn_implementation has it
Kernel = Literal["flash_attention_3", "cudnn", "xla"]
Attend = Literal["auto", Kernel]
HALF = (jnp.bfloat16, jnp.float16)


def absent_gpu() -> GPU | None:
    """Return the GPU that the program is traced for if this machine has no such GPU: a plan's mesh has others."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.device_kind == jax.devices()[0].device_kind:
        return None
    return next((gpu for gpu in GPUS.values() if gpu.description == device.device_kind), None)


def widest_head() -> int:
    """Return the width of a head that cuDNN's attention supports on the program's GPU; 0 if it does not run there."""
    capability = compute_capability()
    if capability < (8, 0):  # cuDNN has no such kernel for a T4 or a V100
        return 0
    return 256 if capability >= (9, 0) and not absent_gpu() else 128  # without a GPU jax._src.cudnn refuses wider heads


def takes_narrow_values(*lengths: int) -> bool:
    """Return whether cuDNN takes values narrower than keys here: from 9.10 on Hopper, undivided, of even lengths."""
    here = not absent_gpu() and compute_capability() >= (9, 0) and cudnn_version() >= 91000
    return here and not _divided() and not any(n % 2 for n in lengths)


def compute_capability() -> tuple[int, ...]:
    """Return the compute capability of the program's GPU, (9, 0) for an H100; () if there is none."""
    if planned := absent_gpu():
        return planned.compute_capability
    if jax.default_backend() != "gpu":
        return ()
    return tuple(map(int, getattr(jax.devices()[0], "compute_capability", "8.0").split(".")))


def flash_obstacle(dtype: jnp.dtype, head_dim: int) -> str | None:
    """Return why FlashAttention-3 cannot be used for queries of this dtype and width of a head, or None."""
    if head_dim != FLASH_WIDTH:
        return f"flash-attn3-jax has heads of {FLASH_WIDTH}, not {head_dim}"
    if dtype not in HALF:
        return f"FlashAttention-3 needs half precision, not {dtype}"
    if compute_capability() != (9, 0):
        return "FlashAttention-3 needs a Hopper GPU"
    mesh = jax.sharding.get_abstract_mesh()
    if divided := _divided():
        return f"FlashAttention-3 is not divided along {' and '.join(divided)}"
    if automatic := [axis for axis, n in mesh.shape.items() if n > 1 and axis not in mesh.manual_axes]:
        return f"XLA does not divide FlashAttention-3 along {' and '.join(automatic)}"
    return flash_missing()


def _divided() -> list[str]:
    """Return the axes that divide a model's functions."""
    mesh = jax.sharding.get_abstract_mesh()
    return [axis for axis in (EXPERT, CONTEXT, TENSOR) if mesh.shape.get(axis, 1) > 1]


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
    choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None, *, causal: bool = False
) -> Kernel:
    """Resolve "auto" for the program's devices: FlashAttention-3 or cuDNN's where they can be used, otherwise XLA's.

    Args:
      causal: whether it is causal attention of as many keys, without mask, lengths and window.
    """
    if choice != "auto":
        return choice
    if causal and softcap is None and _flash_is_here() and flash_obstacle(dtype, head_dim) is None:
        return FLASH
    return "xla" if cudnn_obstacle(dtype, head_dim, widest_head(), softcap) else "cudnn"


def _flash_is_here() -> bool:
    """Return whether the program's GPUs are this machine's, and one of them runs the program or a mesh divides it.

    XLA would gather the operands of FlashAttention-3 in a program that it divides by itself.
    """
    return not absent_gpu() and bool(jax.sharding.get_abstract_mesh().shape or jax.device_count() == 1)


def kernel_note(
    choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None, *, causal: bool = False
) -> str:
    """Return the line about the kernel for the run report; arguments are those of `kernel_for`."""
    kernel = kernel_for(choice, dtype, head_dim, softcap, causal=causal)
    on_gpu = absent_gpu() or jax.default_backend() == "gpu"
    widest = widest_head() if on_gpu else 256  # on simulated devices the reason is plain
    why = cudnn_obstacle(dtype, head_dim, widest, softcap) if choice == "auto" else None
    reason = f": {why}" if why and dtype in HALF else ": cuDNN's with a mask" if kernel == FLASH else ""
    return f"attention kernel {kernel} (attention={choice!r}, {dtype}){reason}"


# ------------------------------------------------------------------ FlashAttention-3
# By Shah et al., arXiv:2407.08608, in the package flash-attn3-jax: the extra `flash`. Shape suffixes: B batch, S
# sequence, H query heads, K key-value heads (K <= H), C width of a head.

Kept = tuple[jax.Array, ...]  # query, key, value, output, sums
FLASH_WIDTH = 128  # of a head: the package's wheels have no other


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash_attention(q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, scale: float) -> jax.Array:
    """Compute causal attention [B, S, H, C] in half precision, with C = `FLASH_WIDTH`."""
    return _flash_forward(q_BSHC, k_BSKC, v_BSKC, scale)[0]


def _flash_forward(q_BSHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, scale: float) -> tuple[jax.Array, Kept]:
    o_BSHC, sums_BHS = _flash_kernels()[0].bind(q_BSHC, k_BSKC, v_BSKC, **_options(scale))
    return o_BSHC, (q_BSHC, k_BSKC, v_BSKC, o_BSHC, sums_BHS)


def _flash_backward(scale: float, kept: Kept, gradient_BSHC: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_flash_kernels()[1].bind(gradient_BSHC, *kept, **_options(scale)))


flash_attention.defvjp(_flash_forward, _flash_backward)


def _options(scale: float) -> dict[str, float | bool | tuple[int, int]]:
    # Without a causal mask the backward pass of 0.2.3 is wrong for sequences of a multiple of 128.
    return {"softmax_scale": scale, "is_causal": True, "window_size": (-1, -1)}


def flash_missing() -> str | None:
    """Return why the package cannot be used, or None."""
    try:
        _flash_kernels()
    except ImportError:
        return f"FlashAttention-3 needs the extra flash: {install_command('flash')}"
    return None


@functools.cache
def _flash_kernels() -> tuple[Any, Any]:
    """Return the primitives of the forward and the backward pass, `flash_mha_fwd_hlo` and `flash_mha_bwd_hlo`."""
    return flash_attention_kernels(_mapped)


def _mapped(
    kernel: Any, xs: Sequence[jax.Array], dims: Sequence[int | None], **options: Any
) -> tuple[list[jax.Array], list[int]]:
    """Run a kernel with a mapped axis as more rows."""
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    each = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(xs, dims, strict=True)
    ]
    found = kernel.bind(*(x.reshape(-1, *x.shape[2:]) for x in each), **options)
    return [x.reshape(size, -1, *x.shape[1:]) for x in found], [0] * len(found)
