"""The part of a state in host memory: which leaves, and the copies that a step makes of them.

A leaf on the host is sharded like any other; only its memory kind is `pinned_host`. So layouts, checkpoints and
exports do not change, and a run may move between the two.

The forward pass copies the masters to the device, a layer at a time. The update computes on the device, but leaves
its operands where they are: its kernels read and write pinned memory over PCIe. That needs no memory on the device,
works for every optimizer, and uses both directions at once. Copying each slice to the device and back does not:
XLA runs the two copies one after the other (experiments/benchmarks has the figures).
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from jzero._compat import memory_view
from jzero.config.sections import ZeroConfig
from jzero.errors import ConfigError
from jzero.layout.sharding import OnHost, ParamLayout
from jzero.layout.storage import to_device
from jzero.mesh import PIPE
from jzero.tree import PyTree

space = jax.memory.Space
HOST = "pinned_host"  # JAX's kind of host memory that GPUs read and write


def on_host(x: jax.Array) -> bool:
    """Return whether an array lies in host memory beside its devices' own."""
    return x.sharding.memory_kind == HOST


def with_memory_kinds(shardings: PyTree, on_host: PyTree) -> PyTree:
    """Give the shardings of the leaves on the host their memory kind; `on_host` is a tree of bools."""
    return jax.tree.map(lambda s, there: s.with_memory_kind(HOST) if there else s, shardings, on_host)


def copy_to_device(layout: ParamLayout, master: jax.Array, dtype: Any) -> jax.Array:
    """Copy a local master to the device in another dtype, in a loop over its layers."""
    if not layout.on_host.master or layout.on_host.in_use:
        return master

    def fetch(x: jax.Array) -> jax.Array:
        return to_device(x).astype(dtype)

    # Without the loop XLA copies all layers at once, and the device must hold them all in float32.
    return lax.map(fetch, master) if layout.stacked else fetch(master)


def on_device(tree: PyTree) -> PyTree:
    """View arrays of host memory as arrays of the device's, to compute with them."""

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


def choose_host_state(layouts: PyTree, config: ZeroConfig) -> PyTree:
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


def check_offload(config: ZeroConfig, mesh: Mesh) -> None:
    """Raise a ConfigError if the mesh does not support the configured offload."""
    if config.offload_param.device == "cpu" and config.stage == 3 and mesh.shape[PIPE] > 1:
        raise ConfigError(
            f'zero_optimization.offload_param.device = "cpu" with mesh.pipe = {mesh.shape[PIPE]}: a pipeline\'s stages '
            "keep their weights on the device; remove it (offload_optimizer works with pipelines), or use mesh.pipe 1"
        )
