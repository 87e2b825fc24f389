"""The sum of squares of each parameter's gradient, from which the norm is computed.

It is summed layer by layer, before the gradients are stacked: XLA then adds up each layer where it is reduced. Over the
stacked arrays the same sums took 6.5 ms instead of 1.8 (7.2B parameters on two H200s).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jzero.mesh import AXES, present
from jzero.tree import PyTree
from jzero.zero import ParamLayout


def sums_of_squares(
    layouts: PyTree, in_use: PyTree, gradients: PyTree, factor: jax.Array, mesh: Mesh, axes: tuple[str, ...] | None
) -> jax.Array:
    """Sum the squares of factor * gradient over all devices, float32 [trained parameters], in the order of the layouts.

    Args:
      layouts, in_use: of the parameters, and of the form that the passes use, with several arrays of one name.
      gradients: of the local masters, in that form; None in the place of everything else.
      axes: along which devices have gradients of their own to add; None: those that divide each parameter.
    """
    sums: dict[str, jax.Array] = {}

    def add(layout: ParamLayout, g: Any) -> None:
        if g is not None:
            own = jnp.sum(jnp.square(g.astype(jnp.float32) * factor))
            sums[layout.name] = sums[layout.name] + own if layout.name in sums else own

    jax.tree.map(add, in_use, gradients)
    trained = [layout for layout in jax.tree.leaves(layouts) if layout.trainable]
    over = {x.name: present(mesh, *(a for a in AXES if a in x.axes)) if axes is None else axes for x in trained}
    for group in dict.fromkeys(filter(None, over.values())):  # in one order, the same in every process
        names = [name for name in over if over[name] == group]
        sums |= zip(names, lax.psum(jnp.stack([sums[name] for name in names]), group), strict=True)
    return jnp.stack([sums[name] for name in over])
