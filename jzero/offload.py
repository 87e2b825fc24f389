"""Offload: the part of a state that lies in the host's memory, and how a step reads and updates it.

A leaf on the host is sharded like any other; only its memory kind is `pinned_host`. So layouts, checkpoints and
exports do not change, and a run may move between the two.

The forward pass copies the masters to the device, a layer at a time. The update computes on the device, but leaves
its operands where they are: its kernels read and write pinned memory over PCIe. That needs no memory on the device,
works for every optimizer, and uses both directions at once. Copying each slice to the device and back does not:
XLA runs the two copies one after the other (experiments/benchmarks has the figures).
"""

from __future__ import annotations

import dataclasses
import os
from math import prod
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from jzero._compat import as_device_array, backends_are_initialized, memory_view
from jzero.config import Config
from jzero.config.sections import ZeroConfig
from jzero.distributed.host_memory import memory_gb
from jzero.distributed.joining import host_of, hosts
from jzero.errors import ConfigError
from jzero.mesh import PIPE, is_gpu
from jzero.tree import PyTree
from jzero.zero import OnHost, ParamLayout, to_device

HOST = "pinned_host"
LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEFAULT_GB = 64  # jaxlib 0.10 and 0.11


def choose(layouts: PyTree, config: ZeroConfig) -> PyTree:
    """Choose which parts of each parameter's state live in host memory: `ParamLayout.on_host`.

    Under `offload_optimizer.ratio` it is the largest parameters', until that share of all elements is reached.
    """
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
        in_use = config.offload_param.device == "cpu" and config.stage == 3 and large
        return OnHost(layout.name in chosen or in_use, layout.name in chosen, in_use)

    return jax.tree.map(lambda layout: dataclasses.replace(layout, on_host=on_host(layout)), layouts)


def check(config: ZeroConfig, mesh: Mesh) -> None:
    """Raise a ConfigError if the mesh does not support the configured offload."""
    if config.offload_param.device == "cpu" and config.stage == 3 and mesh.shape[PIPE] > 1:
        raise ConfigError(
            f'zero_optimization.offload_param.device = "cpu" with mesh.pipe = {mesh.shape[PIPE]}: a pipeline\'s stages '
            "keep their weights on the device; remove it (offload_optimizer works with pipelines), or use mesh.pipe 1"
        )


def allow_pinned_memory(config: Config) -> None:
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


def check_pinned_memory(n_bytes: int, mesh: Mesh) -> None:
    """Raise a ConfigError if the processes of this host may not pin `n_bytes` for each of their devices.

    Otherwise JAX fails minutes later, with an error that names only an allocator. All processes must call it.
    """
    if not is_gpu(mesh):
        return
    here = hosts()[jax.process_index()]
    devices = len(mesh.local_devices), sum(host_of(device) == here for device in mesh.devices.flat)
    of_process, of_host = (n_bytes * n / 2**30 for n in devices)
    limit = float(os.environ.get(LIMIT, DEFAULT_GB))
    if of_host > pinnable_gb():
        raise ConfigError(
            f"zero_optimization.offload_optimizer or offload_param: this host's part of the state takes {of_host:.0f} "
            f"GiB, and {pinnable_gb()} may be pinned, 90 % of its memory or of the job's limit; use more hosts, or "
            "lower offload_optimizer.ratio"
        )
    if of_process > limit:
        raise ConfigError(
            f"zero_optimization.offload_optimizer or offload_param: this process's part of the state takes "
            f"{of_process:.0f} GiB of host memory, and JAX may pin {limit:.0f}; set the environment variable {LIMIT} "
            "before the program starts, or lower offload_optimizer.ratio"
        )


def place(shardings: PyTree, on_host: PyTree) -> PyTree:
    """Give the shardings of the leaves on the host their memory kind; `on_host` is a tree of bools."""
    return jax.tree.map(lambda s, there: s.with_memory_kind(HOST) if there else s, shardings, on_host)


def read(layout: ParamLayout, master: jax.Array, dtype: Any) -> jax.Array:
    """Copy a local master to the device in another dtype, in a loop over its layers.

    Without the loop XLA starts the copies of all layers at once, and they lie on the device in float32.
    """
    if not layout.on_host.master or layout.on_host.in_use:
        return master

    def fetch(x: jax.Array) -> jax.Array:
        return to_device(x).astype(dtype)

    return lax.map(fetch, master) if layout.stacked else fetch(master)


def on_device(tree: PyTree) -> PyTree:
    """View arrays of host memory as arrays of the device's, to compute with them."""
    return jax.tree.map(as_device_array, tree)


def to_devices(tree: PyTree) -> PyTree:
    """Copy arrays of host memory to their devices, outside of a program; return others as they are."""

    def one(x: Any) -> Any:
        on_host = isinstance(x, jax.Array) and x.sharding.memory_kind == HOST
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if on_host else x

    return jax.tree.map(one, tree)


def as_stored(tree: PyTree, like: PyTree) -> PyTree:
    """View the results of a computation as arrays of the memory in which `like` lies."""

    def view(x: jax.Array, old: jax.Array) -> jax.Array:
        space = jax.typeof(old).memory_space
        return x if jax.typeof(x).memory_space == space else memory_view(x, space)

    return jax.tree.map(view, tree, like)
