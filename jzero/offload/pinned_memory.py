"""JAX's limit on pinned host memory: set before JAX starts, checked before a state is made."""

from __future__ import annotations

import os
import socket

import jax
from jax.sharding import Mesh

from jzero._compat import backends_are_initialized
from jzero.config import Config
from jzero.distributed.host_collectives import together
from jzero.distributed.host_memory import memory_gb
from jzero.distributed.joining import host_of, hosts
from jzero.errors import ConfigError
from jzero.mesh import is_gpu

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_GB = 64  # jaxlib 0.10 and 0.11


def allow(config: Config) -> None:
    """Set JAX's limit on pinned memory; JAX reads it once, when it starts the GPUs."""
    state, activations = config.zero_optimization, config.activation_checkpointing
    asked = "cpu" in (state.offload_optimizer.device, state.offload_param.device)
    if (asked or (activations and activations.cpu_checkpointing)) and not backends_are_initialized():
        os.environ.setdefault(LIMIT, str(pinnable_gb()))


def pinnable_gb() -> int:
    """Return how much of the host's memory may be pinned, in GiB.

    JAX's allocator takes memory in regions of growing powers of two, up to its limit, and so more than it hands out.
    Without a margin for the rest of the job the kernel would kill it.
    """
    return int(0.9 * memory_gb())


def check(n_bytes: int, mesh: Mesh) -> None:
    """Raise a ConfigError if the processes of this host may not pin `n_bytes` for each of their devices.

    Otherwise JAX fails minutes later, with an error that names only an allocator. All processes must call it.
    """
    if not is_gpu(mesh):
        return
    here = hosts()[jax.process_index()]
    devices = len(mesh.local_devices), sum(host_of(device) == here for device in mesh.devices.flat)
    of_process, of_host = (n_bytes * n / 2**30 for n in devices)
    # Memory, cgroup and environment may differ between hosts; no process goes on alone.
    together("pinned memory", lambda: _compare(of_host, of_process))


def _compare(of_host: float, of_process: float) -> None:
    """Raise a ConfigError if the state needs more pinned memory, in GiB, than this host or this process may pin."""
    section, host = "zero_optimization.offload_optimizer or offload_param", socket.gethostname()
    if of_host > pinnable_gb():
        raise ConfigError(
            f"{section}: the part of the state on host {host} takes {of_host:.0f} GiB, and {pinnable_gb()} may be "
            "pinned, 90 % of its memory or of the job's limit; use more hosts, or lower offload_optimizer.ratio"
        )
    limit = float(os.environ.get(LIMIT, DEFAULT_GB))
    if of_process > limit:
        raise ConfigError(
            f"{section}: a process's part of the state takes {of_process:.0f} GiB of host memory, and JAX may pin "
            f"{limit:.0f} on host {host}; set the environment variable {LIMIT} before the program starts, or lower "
            "offload_optimizer.ratio"
        )
