"""Bytes of model state per device, from the specs alone: no device, no memory, no program.

Two parts. What persists from step to step is exact: masters and optimizer state as they lie. What lives inside the
step is the stage's promise: the parameters in the compute dtype and their gradients, as the ZeRO paper counts them
(arXiv:1910.02054, section 3: 2 + 2 + 12 bytes per parameter under mixed precision).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jzero.mesh import ZERO
from jzero.zero import STAGES


@dataclass(frozen=True)
class StateBytes:
    """Bytes per device. `formula` is the whole by the ZeRO paper's formula, without rounding, for comparison."""

    masters: int
    optimizer: int
    parameters: float
    gradients: float
    formula: float

    @property
    def persistent(self) -> int:
        """What stays on the device between steps."""
        return self.masters + self.optimizer

    @property
    def total(self) -> float:
        """With the compute-dtype parameters and gradients that live inside the step."""
        return self.persistent + self.parameters + self.gradients


def bytes_per_device(shapes: Any, specs: Any, mesh: Mesh) -> int:
    """Bytes that one device holds of a tree of shapes laid out by a tree of PartitionSpecs."""
    leaves = jax.tree.leaves(shapes)
    flat = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return sum(_local_size(x.shape, spec, mesh) * x.dtype.itemsize for x, spec in zip(leaves, flat, strict=True))


def _local_size(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> int:
    size = prod(shape)
    for axes in spec:
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            size //= mesh.shape[axis]  # exact: a spec only names axes that divide its dimension
    return size


def state_bytes(step: Any) -> StateBytes:
    """The model-state bytes per device of a `TrainStep`."""
    mesh, group = step.mesh, step.mesh.shape[ZERO]
    shapes, specs = step.state_shapes, step.state_specs
    masters = bytes_per_device(shapes.params, specs.params, mesh)
    optimizer = bytes_per_device(shapes.opt_state, specs.opt_state, mesh)
    compute, stage = step.precision.compute.itemsize, STAGES[step.config.zero_optimization.stage]
    parameters = gradients = whole = 0
    for leaf in jax.tree.leaves(step.leaves):
        size = prod(leaf.shape)
        whole += size
        parameters += compute * size // (group if leaf.stage.gather == "layer" else 1)
        gradients += compute * size * leaf.trainable // (group if leaf.stage.scatter == "micro_batch" else 1)
    persistent = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((shapes.params, shapes.opt_state)))
    formula = (
        persistent / (group if stage.shards_state else 1)
        + compute * whole / (group if stage.gather == "layer" else 1)
        + compute * whole / (group if stage.scatter == "micro_batch" else 1)
    )
    # In fp32 the masters are the compute parameters: nothing is held twice.
    if step.precision.compute == step.precision.master and stage.gather != "step":
        formula -= compute * whole / (group if stage.gather == "layer" else 1)
        parameters = 0
    return StateBytes(masters, optimizer, parameters, gradients, formula)
