"""The nearest orthogonal matrices of many matrices, each computed on one device.

A matrix that ZeRO or `tensor` divides would need a collective in each product of the iteration. Matrices of one shape
form a batch instead, which one all-to-all divides by matrices, and another divides as before (Liu et al.,
arXiv:2502.16982, gather each matrix on its owner).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]


class Placement(NamedTuple):
    """Where the parameters, and so the updates, are: the mesh, and a spec for each name."""

    mesh: Mesh
    specs: Mapping[str, PartitionSpec]

    def axes(self, name: str, ndim: int) -> tuple[Axes, ...]:
        """Return the axes that divide each dimension of a parameter."""
        found = [(part,) if isinstance(part, str) else tuple(part or ()) for part in self.specs[name]]
        return (*found, *[()] * (ndim - len(found)))


class Matrices(NamedTuple):
    """Matrices [..., in, out], and the mesh axes that divide each dimension."""

    x: jax.Array
    axes: tuple[Axes, ...]


def orthogonalised(all_matrices: Sequence[Matrices], mesh: Mesh | None, dtype: Any = None) -> list[jax.Array]:
    """Return orthogonal matrices scaled by sqrt(max(1, out / in)), in the shapes given.

    Args:
      mesh: None: all matrices are whole on each device.
      dtype: of what is moved, and of the iteration; default: the matrices' dtype, which the results always have.
        bfloat16 is enough, as in DeepSpeed's `original_muon.py`: in float32, too, singular values are only roughly 1.
    """
    batches = [_batch(Matrices(x.astype(dtype or x.dtype), axes)) for x, axes in all_matrices]
    groups: dict[object, list[int]] = {}
    for i, (x, axes) in enumerate(batches):
        alone = not (axes[-2] or axes[-1])  # nothing to move: a copy into a batch would gain nothing
        groups.setdefault((i if alone else None, x.shape[:-3], x.shape[-2:], axes), []).append(i)
    found: dict[int, jax.Array] = {}
    for members in groups.values():
        together = jnp.concatenate([batches[i].x for i in members], axis=-3) if members[1:] else batches[members[0]].x
        y, start = _on_owners(Matrices(together, batches[members[0]].axes), mesh), 0
        for i in members:
            n = batches[i].x.shape[-3]
            found[i] = _unbatch(jax.lax.slice_in_dim(y, start, start + n, axis=y.ndim - 3), all_matrices[i])
            start += n
    return [found[i] for i in range(len(batches))]


def _order(m: Matrices) -> tuple[list[int], list[int], bool]:
    """Return the divided and the other dimensions before the matrices, and whether these are tall."""
    before = range(m.x.ndim - 2)
    tall = m.x.shape[-2] > m.x.shape[-1]
    return [d for d in before if m.axes[d]], [d for d in before if not m.axes[d]], tall


def _batch(m: Matrices) -> Matrices:
    """Return matrices as [divided dimensions..., B, n, k] with n <= k."""
    divided, undivided, tall = _order(m)
    ends = [m.x.ndim - 1, m.x.ndim - 2] if tall else [m.x.ndim - 2, m.x.ndim - 1]
    x = jnp.transpose(m.x, (*divided, *undivided, *ends))
    x = x.reshape(*x.shape[: len(divided)], -1, *x.shape[-2:])
    return Matrices(x, (*(m.axes[d] for d in divided), (), *(m.axes[d] for d in ends)))


def _unbatch(y: jax.Array, m: Matrices) -> jax.Array:
    """Invert `_batch`, and scale."""
    divided, undivided, tall = _order(m)
    y = y.reshape(*(m.x.shape[d] for d in (*divided, *undivided)), *y.shape[-2:])
    y = jnp.swapaxes(y, -1, -2) if tall else y
    y = jnp.transpose(y, (*np.argsort([*divided, *undivided]).tolist(), y.ndim - 2, y.ndim - 1))
    return max(1.0, m.x.shape[-1] / m.x.shape[-2]) ** 0.5 * y.astype(m.x.dtype)


def _on_owners(batch: Matrices, mesh: Mesh | None) -> jax.Array:
    """Orthogonalise a batch [..., B, n, k], each matrix on one of the devices that divide it.

    The result has further matrices after the batch, up to a multiple of the devices.
    """
    x, (*before, _, n, k) = batch
    owners = (*n, *k)
    if mesh is None or not owners:
        return _newton_schulz(x)

    def placed(x: jax.Array, *axes: Axes) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*(a or None for a in axes))))

    size, devices = x.shape[-3], prod(mesh.shape[axis] for axis in owners)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, -size % devices), (0, 0), (0, 0)])
    steps = [((), n, k), (n, (), k), (owners, (), ())]  # XLA can move the axes of one dimension at a time
    for axes in steps:
        x = placed(x, *before, *axes)
    y = _newton_schulz(x)
    for axes in reversed(steps):
        y = placed(y, *before, *axes)
    return y


def _newton_schulz(x: jax.Array) -> jax.Array:
    """Run five quintic Newton-Schulz steps on matrices [..., n, k], n <= k: singular values end in about 0.5 to 1.5.

    In 16 bits the products are; what lies between is computed in float32. Coefficients in bfloat16 would double the
    error.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = x.dtype
    wide = x.astype(jnp.promote_types(dtype, jnp.float32))
    x = (wide / (jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) + 1e-7)).astype(dtype)  # spectral norm <= 1

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x @ y).astype(wide.dtype)

    def step(_: int, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, -1, -2)
        polynomial = (b * gram.astype(wide.dtype) + c * product(gram, gram)).astype(dtype)
        return (a * x.astype(wide.dtype) + product(polynomial, x)).astype(dtype)

    return jax.lax.fori_loop(0, 5, step, x)
