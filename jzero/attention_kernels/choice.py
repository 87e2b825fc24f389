"""Chooses attention's kernel: FlashAttention-3's or cuDNN's where it runs, otherwise XLA's."""

from __future__ import annotations

import importlib.util
from typing import Literal

import jax
import jax.numpy as jnp

from jzero.attention_kernels.flash import WIDTH
from jzero.mesh import CONTEXT, EXPERT, TENSOR
from jzero.planner.gpus import GPU, GPUS

FLASH: Literal["flash_attention_3"] = "flash_attention_3"  # as Hugging Face's attn_implementation has it
Kernel = Literal["flash_attention_3", "cudnn", "xla"]
Attend = Literal["auto", "flash_attention_3", "cudnn", "xla"]
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
    return 256 if capability >= (9, 0) and not absent_gpu() else 128  # as in jax._src.cudnn, which asks for a GPU


def compute_capability() -> tuple[int, ...]:
    """Return that of the program's GPU, (9, 0) for an H100; () if there is none."""
    if planned := absent_gpu():
        return planned.compute_capability
    if jax.default_backend() != "gpu":
        return ()
    return tuple(map(int, getattr(jax.devices()[0], "compute_capability", "8.0").split(".")))


def flash_obstacle(dtype: jnp.dtype, head_dim: int, softcap: float | None = None, plain: bool = False) -> str | None:
    """Return why FlashAttention-3 cannot be used, or None.

    Args:
      dtype, head_dim: of the queries.
      softcap: of the scores.
      plain: whether attention is causal, of as many queries as keys, without a bias, a mask, lengths of rows and a
        window. The backward pass of flash-attn3-jax 0.2.3 is wrong without a causal mask.
    """
    if softcap is not None or not plain:
        return "FlashAttention-3 is used for causal attention without soft caps, biases, masks and windows"
    if head_dim != WIDTH:
        return f"flash-attn3-jax has heads of {WIDTH}, not {head_dim}"
    if dtype not in HALF:
        return "FlashAttention-3 needs half precision"
    if compute_capability() != (9, 0):
        return "FlashAttention-3 needs a Hopper GPU"
    sizes = jax.sharding.get_abstract_mesh().shape
    if divided := [axis for axis in (EXPERT, CONTEXT, TENSOR) if sizes.get(axis, 1) > 1]:
        return f"FlashAttention-3 is not divided along {' and '.join(divided)}"
    if importlib.util.find_spec("flash_attn3_jax") is None:
        return "FlashAttention-3 needs the extra flash: pip install 'jzero[flash]'"
    return None


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
    choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None, plain: bool = False
) -> Kernel:
    """Resolve "auto" for the program's devices; see `flash_obstacle` for the arguments."""
    if choice != "auto":
        return choice
    if flash_obstacle(dtype, head_dim, softcap, plain) is None:
        return FLASH
    return "xla" if cudnn_obstacle(dtype, head_dim, widest_head(), softcap) else "cudnn"


def kernel_note(
    choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None, causal: bool = True
) -> str:
    """Return the line about the kernel for the run report."""
    kernel = kernel_for(choice, dtype, head_dim, softcap, causal)
    on_gpu = absent_gpu() or jax.default_backend() == "gpu"
    widest = widest_head() if on_gpu else 256  # on simulated devices the reason is plain
    why = None
    if choice == "auto" and dtype in HALF:
        why = cudnn_obstacle(dtype, head_dim, widest, softcap)
        if kernel == FLASH:
            why = "cuDNN's with masks"
        elif why is None and causal and head_dim == WIDTH and compute_capability() == (9, 0):
            why = flash_obstacle(dtype, head_dim, plain=True)
    return f"attention kernel {kernel} (attention={choice!r}, {dtype})" + f": {why}" * bool(why)
