"""JAX's limit on pinned host memory: set before JAX starts, checked before a state is made."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from jzero._compat import backends_are_initialized
from jzero.config import Config
from jzero.distributed.host_collectives import together
from jzero.distributed.joining import host_of, hosts
from jzero.distributed.machine import memory_gb
from jzero.distributed.place import find_place
from jzero.errors import ConfigError
from jzero.mesh import is_gpu

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of each GPU: JAX has an allocator of pinned memory for each of them
DEFAULT_GB = 64  # jaxlib 0.10 and 0.11


def allow(config: Config) -> None:
    """Set JAX's limit on pinned memory; JAX reads it once, when it starts the GPUs."""
    state, activations = config.zero_optimization, config.activation_checkpointing
    asked = "cpu" in (state.offload_optimizer.device, state.offload_param.device)
    if (asked or (activations and activations.cpu_checkpointing)) and not backends_are_initialized():
        os.environ.setdefault(LIMIT, str(max(1, pinnable_gb() // gpus_of_host(os.environ))))


def pinnable_gb() -> int:
    """Return how much of the host's memory may be pinned, in GiB."""
    # JAX's allocators take memory in regions of growing powers of two, up to their limits, and so more than they hand
    # out. Without a margin for the rest of the job the kernel would kill it.
    return int(0.9 * memory_gb())


def gpus_of_host(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return how many GPUs the job uses on this host, without starting JAX.

    Args:
      env: the environment of this process. Several processes on a host use one GPU each; one process uses those in
        CUDA_VISIBLE_DEVICES, or all.
      root: the file system's root, for tests.
    """
    processes = find_place(env).local_size
    if processes > 1:
        return processes
    if visible := env.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    return max(1, sum(path.name.removeprefix("nvidia").isdigit() for path in (root / "dev").glob("nvidia*")))


def check_pinnable(n_bytes: int, mesh: Mesh) -> None:
    """Raise a ConfigError if this host cannot pin `n_bytes` for each of its devices, or JAX may not.

    All processes must call it.
    """
    if not is_gpu(mesh):
        return
    # JAX would fail minutes later, with an error that names only an allocator.
    here = hosts()[jax.process_index()]
    of_device = n_bytes / 2**30
    of_host = of_device * sum(host_of(device) == here for device in mesh.devices.flat)
    # Memory, cgroup and environment may differ between hosts; no process goes on alone.
    together("pinned memory", lambda: _compare(of_host, of_device))


def _compare(of_host: float, of_device: float) -> None:
    """Raise a ConfigError if the state needs more pinned memory, in GiB, than this host or a GPU may have."""
    section, host = "zero_optimization.offload_optimizer or offload_param", socket.gethostname()
    if of_host > pinnable_gb():
        raise ConfigError(
            f"{section}: the part of the state on host {host} takes {of_host:.0f} GiB, and {pinnable_gb()} may be "
            "pinned, 90 % of its memory or of the job's limit; use more hosts, or lower offload_optimizer.ratio"
        )
    limit = float(os.environ.get(LIMIT, DEFAULT_GB))
    if of_device > limit:
        raise ConfigError(
            f"{section}: a GPU's part of the state takes {of_device:.0f} GiB of host memory, and JAX may pin "
            f"{limit:.0f} for each GPU of host {host}; set the environment variable {LIMIT} before the program starts, "
            "or lower offload_optimizer.ratio"
        )
