"""The compressed all-reduce of the 1-bit optimizers: signs with one scale, and error feedback.

DeepSpeed's `compressed_allreduce` (runtime/comm/nccl.py; arXiv:2102.02888): every device adds its error to its vector
and sends the signs of each part to that part's server, with one scale. The server averages, adds its own error, and
sends the signs of the average to all. What is lost on the way is the new error: it is sent in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import GetAttrKey

from jzero.tree import PyTree, path_name

WORKER_ERROR = "worker_error"
# The fields of optimizers' states that have a row for each device.
ROWS = {WORKER_ERROR, "server_error", "own_mu", "own_steps", "own_rates", "own_norm"}


class Replicas(NamedTuple):
    """The devices that average inside the optimizer.

    Attributes:
      mesh, axes: they lie along these axes.
      clip: the largest norm of a gradient; 0: any.
      dtype: in which gradients are summed before they are compressed.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    clip: float = 0.0
    dtype: Any = jnp.float32

    @property
    def size(self) -> int:
        return prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """Of an array with a row for each device."""
        return PartitionSpec(self.axes)

    def rows(self, specs: PyTree) -> PyTree:
        """Return the specs of arrays with a row for each device before their own dimensions."""
        return jax.tree.map(lambda spec: PartitionSpec(self.axes, *spec), specs)

    def total(self, rows: PyTree) -> PyTree:
        """Sum over the devices."""
        return jax.tree.map(lambda x: x.sum(0), rows)

    def on_each(self, function: Callable[[Any, Any], tuple[Any, Any]], own: PyTree, shared: PyTree) -> Any:
        """Run `function(own, shared) -> (own, shared)` on every device: its rows of `own`, and what all have."""

        def local(own: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
            own, shared = function(jax.tree.map(lambda x: x[0], own), shared)
            return jax.tree.map(lambda x: x[None], own), shared

        specs = self.spec, PartitionSpec()
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=specs, check_vma=False)(own, shared)

    def all_reduce(self, updates: PyTree) -> tuple[PyTree, jax.Array]:
        """Sum the rows of gradients exactly; return the clipped gradient, and its norm before in every row."""

        def summed(own: PyTree, _: Any) -> tuple[PyTree, PyTree]:
            return (), jax.tree.map(lambda g: lax.psum(g.astype(self.dtype), self.axes).astype(g.dtype), own)

        grads, norm = self.clipped(self.on_each(summed, updates, ())[1])
        return grads, self.row_each(norm)

    def of_device(self, own: PyTree) -> tuple[PyTree, jax.Array]:
        """Return a device's gradient in the scale of the mean, and its norm before it is clipped.

        Every device clips by its own norm, as in DeepSpeed: none knows the norm of the sum.
        """
        return self.clipped(jax.tree.map(lambda g: g * self.size, own))

    def clipped(self, grads: PyTree) -> tuple[PyTree, jax.Array]:
        """Return the gradients with a norm of `clip` at most, and their norm before."""
        norm = optax.tree.norm(grads)
        if not self.clip:
            return grads, norm
        factor = jnp.where(norm > self.clip, self.clip / norm, 1.0)
        return jax.tree.map(lambda g: g * factor, grads), norm

    def row_each(self, tree: PyTree) -> PyTree:
        """Give every device a row of its own, at first the same."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.size, *x.shape)), tree)


def has_rows(path: tuple) -> bool:
    """Return whether the leaf of a state at a key path has a row for each device, so that it fits no other number.

    A field of an optimizer's state is an attribute; a module of the same name is a key of a dict.

    >>> from jax.tree_util import DictKey
    >>> has_rows((GetAttrKey("worker_error"), DictKey("w"))), has_rows((GetAttrKey("mu"), DictKey("worker_error")))
    (True, False)
    """
    return any(isinstance(key, GetAttrKey) and key.name in ROWS for key in path)


def rows_of(state: PyTree) -> list[str]:
    """List the names of the leaves that have a row for each device."""
    return [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0] if has_rows(path)]


def padded(elements: int, size: int) -> int:
    """Return the length of a vector whose parts for `size` servers fill bytes."""
    return -(-elements // (8 * size)) * 8 * size


def pack(signs: jax.Array) -> jax.Array:
    """Pack bools [..., n] into uint8 [..., n / 8], bit k from the k-th eighth: no stride, so no slow reads."""
    packed, *others = jnp.split(signs.astype(jnp.uint8), 8, axis=-1)
    for k, part in enumerate(others, start=1):
        packed |= part << k
    return packed


def unpack(packed: jax.Array) -> jax.Array:
    """Invert `pack`: float32, 1 or -1.

    >>> unpack(pack(jnp.array([True, False] * 4))).tolist()
    [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    """
    bits = jnp.concatenate([(packed >> k) & 1 for k in range(8)], axis=-1)
    return bits.astype(jnp.float32) * 2 - 1


def squeeze(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the signs of x [..., n] packed, the scale that keeps its norm, and the error of both."""
    scale = jnp.sqrt(jnp.mean(x * x))
    signs = x >= 0
    return pack(signs), scale, x - jnp.where(signs, scale, -scale)


def compressed_all_reduce(
    x: jax.Array, worker_error: jax.Array, server_error: jax.Array, axes: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Average over the devices along `axes`, inside a region that is manual over them.

    Args:
      x: this device's, of any shape.
      worker_error: this device's, float32 [n] with n = `padded(x.size, devices)`.
      server_error: of the part that this device averages, [n / devices].

    Returns:
      The average, the same on all devices, and the new errors.
    """
    size = lax.axis_size(axes)
    vector = jnp.pad(x.reshape(-1), (0, worker_error.size - x.size)) + worker_error
    packed, scale, worker_error = squeeze(vector.reshape(size, -1))
    packed, scales = lax.all_to_all(packed, axes, 0, 0), lax.all_gather(scale, axes)
    average = (unpack(packed) * scales[:, None]).sum(0) / size
    packed, scale, server_error = squeeze(average + server_error)
    packed, scales = lax.all_gather(packed, axes), lax.all_gather(scale, axes)
    average = (unpack(packed) * scales[:, None]).reshape(-1)
    return average[: x.size].reshape(x.shape), worker_error.reshape(-1), server_error
