"""Chooses attention's kernel: cuDNN's where it runs, otherwise XLA's; FlashAttention-3's where it is asked for."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jzero.attention_kernels import flash
from jzero.mesh import CONTEXT, EXPERT, TENSOR
from jzero.planner.gpus import GPU, GPUS

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


def compute_capability() -> tuple[int, ...]:
    """Return the compute capability of the program's GPU, (9, 0) for an H100; () if there is none."""
    if planned := absent_gpu():
        return planned.compute_capability
    if jax.default_backend() != "gpu":
        return ()
    return tuple(map(int, getattr(jax.devices()[0], "compute_capability", "8.0").split(".")))


def flash_obstacle(dtype: jnp.dtype, head_dim: int) -> str | None:
    """Return why FlashAttention-3 cannot be used for queries of this dtype and width of a head, or None."""
    if head_dim != flash.WIDTH:
        return f"flash-attn3-jax has heads of {flash.WIDTH}, not {head_dim}"
    if dtype not in HALF:
        return f"FlashAttention-3 needs half precision, not {dtype}"
    if compute_capability() != (9, 0):
        return "FlashAttention-3 needs a Hopper GPU"
    mesh = jax.sharding.get_abstract_mesh()
    if divided := [axis for axis in (EXPERT, CONTEXT, TENSOR) if mesh.shape.get(axis, 1) > 1]:
        return f"FlashAttention-3 is not divided along {' and '.join(divided)}"
    if automatic := [axis for axis, n in mesh.shape.items() if n > 1 and axis not in mesh.manual_axes]:
        return f"XLA does not divide FlashAttention-3 along {' and '.join(automatic)}"
    return flash.missing()


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


def kernel_for(choice: Attend, dtype: jnp.dtype, head_dim: int = 64, softcap: float | None = None) -> Kernel:
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
    reason = f": {why}" if why and dtype in HALF else ": cuDNN's with a mask" if kernel == FLASH else ""
    return f"attention kernel {kernel} (attention={choice!r}, {dtype}){reason}"
