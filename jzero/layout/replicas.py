"""Operations over the replicas, for losses that see more of the batch than one replica does.

The train step gives every replica its own rows of a micro-batch. These functions reach the others'; gradients flow
through them, and are those of one device with all rows. Outside the step (in `init`, on one device, in plain Flax) they
are the identity. In a pipeline, call them in the prefix, the suffix or the loss function.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jzero.mesh import BATCH_AXES
from jzero.tree import PyTree


def replica_axes() -> tuple[str, ...]:
    """List the mesh axes over which the code being traced sees a part of the batch; none outside the train step."""
    return tuple(axis for axis in BATCH_AXES if axis_exists(axis) and lax.axis_size(axis) > 1)


def axis_exists(name: str) -> bool:
    """Return whether the code being traced can reduce over an axis: a mesh axis of the train step, or a vmap's."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def all_gather(x: PyTree) -> PyTree:
    """Concatenate the leading dimension of all replicas' arrays: [rows, ...] -> [replicas * rows, ...].

    The rows of replica r begin at `axis_index() * rows`.

    >>> all_gather(jnp.ones((2, 3))).shape
    (2, 3)
    """
    axes = replica_axes()
    return jax.tree.map(lambda v: lax.all_gather(v, axes, axis=0, tiled=True), x) if axes else x


def axis_index() -> jax.Array:
    """Return the number of the replica, int32; 0 outside the train step.

    >>> int(axis_index())
    0
    """
    axes = replica_axes()
    return lax.axis_index(axes) if axes else jnp.int32(0)


def mean(x: PyTree) -> PyTree:
    """Average arrays over the replicas.

    >>> mean({"a": 3.0})
    {'a': 3.0}
    """
    axes = replica_axes()
    return lax.pmean(x, axes) if axes else x
