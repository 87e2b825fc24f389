"""The part of a state in host memory: which leaves, the copies that a step makes of them, and JAX's limit.

A leaf on the host is sharded like any other; only its memory kind is `pinned_host`. So layouts, checkpoints and
exports do not change, and a run may move between the two.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from jzero._compat import backends_are_initialized, memory_view
from jzero.config import Config
from jzero.config.sections import ZeroConfig
from jzero.distributed.host_collectives import run_on_all
from jzero.distributed.joining import host_of, hosts
from jzero.distributed.machine import memory_gb
from jzero.distributed.place import find_place
from jzero.errors import ConfigError
from jzero.layout.sharding import OnHost, ParamLayout
from jzero.layout.storage import to_device
from jzero.mesh import PIPE, is_gpu
from jzero.tree import PyTree

space = jax.memory.Space
HOST = "pinned_host"  # JAX's kind of host memory that GPUs read and write


def on_host(x: jax.Array) -> bool:
    """Return whether an array is in host memory."""
    return x.sharding.memory_kind == HOST


def copy_to_device(layout: ParamLayout, master: jax.Array, dtype: Any) -> jax.Array:
    """Copy a local master to the device in another dtype, in a loop over its layers."""
    if not layout.on_host.master or layout.on_host.in_use:
        return master

    # A copy, and then the cast: with a kernel that reads host memory XLA kept the bfloat16 weights there, and a step of
    # 1.1B took 5.6 s instead of 0.5 (an H100, experiments/benchmarks/2026-11-23-offload-h100.md).
    def fetch(x: jax.Array) -> jax.Array:
        return to_device(x).astype(dtype)

    # Without the loop XLA copies all layers at once, and the device must hold them all in float32.
    return lax.map(fetch, master) if layout.stacked else fetch(master)


def on_device(tree: PyTree) -> PyTree:
    """View arrays of host memory as arrays of the device's, to compute with them."""

    # The update's kernels read and write pinned memory over PCIe. That needs no memory on the device, works for every
    # optimizer and uses both directions at once: 0.35 s for a billion parameters. With copies inside the program, which
    # XLA runs one after the other, it took 0.45, and 2.2 on the host's 32 cores (an H100).
    def view(x: jax.Array) -> jax.Array:
        return memory_view(x, space.Device) if jax.typeof(x).memory_space == space.Host else x

    return jax.tree.map(view, tree)


def to_devices(tree: PyTree) -> PyTree:
    """Copy arrays of host memory to their devices, outside of a program; return others as they are."""

    def one(x: Any) -> Any:
        moves = isinstance(x, jax.Array) and on_host(x)
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if moves else x

    return jax.tree.map(one, tree)


def as_stored(tree: PyTree, like: PyTree) -> PyTree:
    """View the results of a computation as arrays of the memory in which `like` lies."""

    def view(x: jax.Array, old: jax.Array) -> jax.Array:
        there = jax.typeof(old).memory_space
        return x if jax.typeof(x).memory_space == there else memory_view(x, there)

    return jax.tree.map(view, tree, like)


def choose_host_state(layouts: PyTree, config: ZeroConfig, mesh: Mesh) -> PyTree:
    """Choose which parts of each parameter's state live in host memory: `ParamLayout.on_host`.

    Under `offload_optimizer.ratio` it is the largest parameters', until that share of all elements is reached.

    Raises:
      ConfigError: the mesh does not support the configured offload.
    """
    if config.offload_param.device == "cpu" and config.stage == 3 and mesh.shape[PIPE] > 1:
        raise ConfigError(
            f'zero_optimization.offload_param.device = "cpu" with mesh.pipe = {mesh.shape[PIPE]}: a pipeline\'s stages '
            "keep their weights on the device; remove it (offload_optimizer works with pipelines), or use mesh.pipe 1"
        )
    trained = [layout for layout in jax.tree.leaves(layouts) if layout.trainable]
    wanted = config.offload_optimizer.ratio * sum(prod(layout.shape) for layout in trained)
    chosen, size = set(), 0
    for layout in sorted(trained, key=lambda layout: -prod(layout.shape)):
        if config.offload_optimizer.device == "cpu" and size < wanted:
            chosen.add(layout.name)
            size += prod(layout.shape)

    def on_host(layout: ParamLayout) -> OnHost:
        size = prod(layout.shape[layout.stacked :])
        large = not layout.state and size >= config.stage3_param_persistence_threshold
        # A small weight would cost the latency of a copy in every layer, and free little.
        in_use = config.offload_param.device == "cpu" and config.stage == 3 and large
        return OnHost(layout.name in chosen or in_use, layout.name in chosen, in_use)

    return jax.tree.map(lambda layout: dataclasses.replace(layout, on_host=on_host(layout)), layouts)


# ------------------------------------------------------------------ JAX's limit on pinned memory

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of each GPU: JAX has an allocator of pinned memory for each of them
DEFAULT_GB = 64  # jaxlib 0.10 and 0.11


def allow_pinned(config: Config) -> None:
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


def check_pinned(n_bytes: int, mesh: Mesh) -> None:
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
    run_on_all("pinned memory", lambda: _compare(of_host, of_device))


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
