"""The memory that a GPU has for XLA."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATED = 0.75  # of the GPU's memory: JAX's default, see its page "GPU memory allocation"
# Assumed, not measured: what NCCL's communicators (buffers per channel and peer) and CUDA with its libraries (context,
# modules, cuBLAS's and cuDNN's workspaces) take beside XLA's memory.
NCCL_ROOM, CUDA_ROOM = int(1.5 * 2**30), 2**30


@dataclass(frozen=True)
class Room:
    """Bytes of one GPU.

    Attributes:
      device: all that CUDA reports.
      preallocated: what XLA takes at the start.
      most: the most that it could take: without NCCL's and CUDA's own, which are assumed.
      limit: what XLA's scheduler keeps a step's memory under, where it can.
      nccl: of NCCL's buffers.
    """

    device: int
    preallocated: int
    most: int
    limit: int
    nccl: int = 0


def planned_room(memory: int, gpus: int) -> Room:
    """Return what one of `gpus` GPUs of so much memory has.

    The environment's share is XLA's limit; without one, a plan lets XLA have the most that there is, since a run that
    needs it sets the share. XLA then compiles the program of that run: short of memory, it schedules another one.
    """
    given, nccl = os.environ.get(FRACTION), NCCL_ROOM if gpus > 1 else 0
    preallocated, most = int(float(given or PREALLOCATED) * memory), memory - nccl - CUDA_ROOM
    return Room(memory, preallocated, most, preallocated if given else most, nccl)


def room_here() -> Room | None:
    """Return what XLA has of this process's first device; None if it does not say, as CPUs do not."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Room(limit, limit, limit, limit) if limit else None
