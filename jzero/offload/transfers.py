"""How a step reads and updates the part of a state that lies in host memory.

A leaf on the host is sharded like any other; only its memory kind is `pinned_host`. So layouts, checkpoints and
exports do not change, and a run may move between the two.

The forward pass copies the masters to the device, a layer at a time. The update computes on the device, but leaves
its operands where they are: its kernels read and write pinned memory over PCIe. That needs no memory on the device,
works for every optimizer, and uses both directions at once. Copying each slice to the device and back does not:
XLA runs the two copies one after the other (experiments/benchmarks has the figures).
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jzero._compat import as_device_array, memory_view
from jzero.tree import PyTree
from jzero.zero import ParamLayout, to_device

HOST = "pinned_host"  # JAX's kind of host memory that GPUs read and write


def on_host(x: jax.Array) -> bool:
    """Return whether an array lies in host memory beside its devices' own."""
    return x.sharding.memory_kind == HOST


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
        moves = isinstance(x, jax.Array) and on_host(x)
        return jax.device_put(x, x.sharding.with_memory_kind("device")) if moves else x

    return jax.tree.map(one, tree)


def as_stored(tree: PyTree, like: PyTree) -> PyTree:
    """View the results of a computation as arrays of the memory in which `like` lies."""

    def view(x: jax.Array, old: jax.Array) -> jax.Array:
        space = jax.typeof(old).memory_space
        return x if jax.typeof(x).memory_space == space else memory_view(x, space)

    return jax.tree.map(view, tree, like)
