"""Computes the bytes of model state per device from the PartitionSpecs alone, without devices or a program.

Master parameters and optimizer state persist between steps; their bytes are exact. Inside a step the ZeRO paper adds
(arXiv:1910.02054, section 3; 2 + 2 + 12 bytes per parameter):

- parameters in the compute dtype: full size if the stage gathers once per step, else sharded like the masters, or
  among the n devices of a group (hpZ). In fp32 only gathered parameters are a copy; the others are the masters. A
  weight that is multiplied in fp8 has one byte per element; before a trace tells which ones these are, it is every
  matrix of the stack that is large enough.
- gradients of trainable parameters: the sum over micro-batches in `data_types.grad_accum_dtype`; without accumulation
  the gradient in the dtype of the backward pass. A pipeline always sums.

A parameter divided by `pipe`, `expert` or `tensor` counts with its local part; the formula divides everything by `pipe`
and `tensor`, and the experts by `expert`.

Not included, because it changes from layer to layer: the layer that stage 3 has gathered, the gradient of the current
micro-batch, activations. `jzero.planner.memory` gives the peak of the whole program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.config import Config
from jzero.layout.sharding import ON_DEVICE, ParamLayout, optimizer_layouts, owners
from jzero.layout.zero import RULES, Rule
from jzero.mesh import EXPERT, PIPE, TENSOR, ZERO_AXES, make_mesh
from jzero.model import Model
from jzero.step.train_step import TrainStep, make_train_step
from jzero.tracing.fp8_weights import large_weights
from jzero.tree import PyTree, named


@dataclass(frozen=True)
class StateBytes:
    """Bytes per device. `formula` is the total if the stage could shard every leaf, without rounding.

    `host` is the part of `masters` and `optimizer` that lies in host memory.
    """

    masters: int
    optimizer: int
    parameters: int
    gradients: int
    formula: float
    host: int = 0

    @property
    def persistent(self) -> int:
        """Bytes that stay on the device between steps."""
        return self.masters + self.optimizer - self.host

    @property
    def least(self) -> int:
        """Bytes that every step needs on the device: clipping reads all gradients at once."""
        return self.persistent + max(self.parameters, self.gradients)

    @property
    def total(self) -> int:
        """Persistent bytes plus the compute parameters and gradients inside a step."""
        return self.persistent + self.parameters + self.gradients


def bytes_per_device(shapes: PyTree, specs: PyTree, mesh: Mesh) -> int:
    """Compute the bytes per device of a tree of shapes that is sharded by a tree of PartitionSpecs."""
    flat = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    return sum(_local_bytes(x, spec, mesh) for x, spec in zip(jax.tree.leaves(shapes), flat, strict=True))


def _local_bytes(x: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> int:
    return prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize


def gradient_dtype(step: TrainStep, rule: Rule) -> np.dtype:
    """Return the dtype of the gradients that the update reads: of their sum, or of the only micro-batch."""
    precision = step.precision
    if step.setup.passes.facts.always_sums or step.batch_sizes.accum > 1:  # a pipeline always sums them
        return jnp.dtype(precision.accum)
    return jnp.dtype(precision.reduce if rule.scatter == "micro_batch" else precision.compute)


def _inside(
    step: TrainStep, layout: ParamLayout, x: jax.ShapeDtypeStruct, parts: int, group: int, in_fp8: bool
) -> tuple[float, float]:
    """Return (bytes of a leaf's compute copy, bytes of its gradient) under its rule, for 1/`parts` of the leaf.

    `group` is the number of devices that ZeRO partitions the leaf over; `in_fp8` whether it is multiplied in fp8.
    """
    rule, trainable, on_host = layout.rule, layout.trainable, layout.on_host
    compute = jnp.dtype(step.precision.compute if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
    # A frozen parameter is there once, unless there is a second copy.
    copied = rule.plus.secondary > 0 or (trainable and (rule.gather == "step" or compute != x.dtype))
    copied = (copied or on_host.master or in_fp8) and not on_host.in_use
    shares = rule.plus.secondary or (group if rule.gather == "layer" else 1)  # the devices that share it
    gradient = gradient_dtype(step, rule)
    size = x.size / parts
    return (
        copied * size * (1 if in_fp8 else compute.itemsize) / shares,
        trainable * size * gradient.itemsize / (group if rule.scatter == "micro_batch" else 1),
    )


def names_in_fp8(step: TrainStep) -> frozenset[str]:
    """Return the parameters that are multiplied in fp8, or, before a trace, those whose size allows it."""
    section, noted = step.config.fp8, step.setup.fp8.choice
    if not section.enabled:
        return frozenset()
    if noted is not None:
        return noted.names
    return large_weights(section, jax.tree.leaves(step.layouts), getattr(step.model, "names", None))


class LeafBytes(NamedTuple):
    """Bytes per device of one parameter; as in `StateBytes`, but masters and optimizer without what is on the host."""

    masters: float = 0
    optimizer: float = 0
    parameters: float = 0
    gradients: float = 0
    host: float = 0


def leaf_bytes(step: TrainStep) -> dict[str, LeafBytes]:
    """Compute the bytes per device of every parameter; "" has the optimizer's state that belongs to none.

    The histories of fp8 count as state of the optimizer.
    """
    shapes, mesh = step.state_shapes, step.mesh
    found = {"": LeafBytes(optimizer=bytes_per_device(shapes.fp8, step.state_specs.fp8, mesh))}
    in_fp8 = names_in_fp8(step)
    for layout, x in zip(jax.tree.leaves(step.layouts), jax.tree.leaves(shapes.params), strict=True):
        parts = prod(mesh.shape[axis] for axis in (*dict(layout.divided), PIPE) if axis in layout.axes)  # while used
        group = prod(mesh.shape[axis] for axis in layout.group)
        inside = _inside(step, layout, x, parts, group, layout.name in in_fp8)
        master, there = _local_bytes(x, layout.spec, mesh), layout.on_host.master
        found[layout.name] = LeafBytes(master * (not there), 0, *inside, master * there)
    owner_of = owners(step.layouts)
    moments = optimizer_layouts(shapes.opt_state, step.layouts)
    for (name, x), layout in zip(named(shapes.opt_state).items(), jax.tree.leaves(moments), strict=True):
        owner, size = owner_of(name), _local_bytes(x, layout.spec, mesh)
        key, there = owner.name if owner else "", layout.on_host.moments
        old = found[key]
        found[key] = old._replace(optimizer=old.optimizer + size * (not there), host=old.host + size * there)
    return found


def host_reads(step: TrainStep) -> int:
    """Compute the bytes of masters in host memory that each device reads in a step, before the update.

    Each master is read once for the copy in the compute dtype, or, where a layer's weights stay on the host, in the
    forward and the backward pass of every micro-batch.
    """
    total, passes = 0, 2 * step.batch_sizes.accum
    for layout, x in zip(jax.tree.leaves(step.layouts), jax.tree.leaves(step.state_shapes.params), strict=True):
        if layout.on_host.master:
            total += _local_bytes(x, layout.spec, step.mesh) * (passes if layout.on_host.in_use else 1)
    return total


def state_bytes(step: TrainStep) -> StateBytes:
    """Compute the model-state bytes per device of a `TrainStep`."""
    shapes, specs, mesh = step.state_shapes, step.state_specs, step.mesh
    group, parts = prod(mesh.shape[axis] for axis in ZERO_AXES), mesh.shape[PIPE] * mesh.shape[TENSOR]
    stage = step.setup.rule if group > 1 else RULES[0]
    leaves = list(zip(jax.tree.leaves(step.layouts), jax.tree.leaves(shapes.params), strict=True))
    actual = leaf_bytes(step).values()
    ideal, in_fp8 = [], names_in_fp8(step)
    for leaf, x in leaves:
        experts = mesh.shape[EXPERT] if EXPERT in dict(leaf.divided) else 1
        layout = replace(leaf, rule=stage, on_host=ON_DEVICE)
        ideal.append(_inside(step, layout, x, parts * experts, group // experts, leaf.name in in_fp8))
    lies = jax.tree.leaves((specs.params, specs.opt_state), is_leaf=lambda s: isinstance(s, PartitionSpec))
    persistent = sum(
        # A stage that shards state divides experts among the whole group; without one only `expert` divides them.
        x.size
        * x.dtype.itemsize
        / (1 if stage.shards_state or EXPERT not in jax.tree.leaves(tuple(spec)) else mesh.shape[EXPERT])
        for x, spec in zip(jax.tree.leaves((shapes.params, shapes.opt_state)), lies, strict=True)
    )
    histories = bytes_per_device(shapes.fp8, specs.fp8, mesh)
    frozen = sum(x.size * x.dtype.itemsize for leaf, x in leaves if not leaf.trainable)
    whole = 0 if stage.gather == "layer" else frozen  # frozen weights are partitioned under stage 3 alone
    return StateBytes(
        masters=bytes_per_device(shapes.params, specs.params, mesh),
        optimizer=bytes_per_device(shapes.opt_state, specs.opt_state, mesh) + histories,
        parameters=int(sum(leaf.parameters for leaf in actual)),
        gradients=int(sum(leaf.gradients for leaf in actual)),
        formula=((persistent - whole) / (group if stage.shards_state else 1) + whole) / parts
        + sum(map(sum, ideal))
        + histories,
        host=step.host_bytes,
    )


def zero2(parameters: int, gpus: int, *, offload: bool = False) -> int:
    """Estimate the bytes of model state per GPU under ZeRO-2."""
    return 2 * parameters + (0 if offload else int(18 * parameters / gpus))


def zero3(parameters: int, largest: int, gpus: int, *, offload: bool = False, offload_params: bool = False) -> int:
    """Estimate the bytes of model state per GPU under ZeRO-3; `largest`: parameters of the largest layer."""
    if offload:
        return 4 * largest + (0 if offload_params else int(2 * parameters / gpus))
    return 4 * largest + int(18 * parameters / gpus)


def deepspeed_estimate(step: TrainStep) -> int | None:
    """Estimate the bytes per GPU for the config of a step; None where DeepSpeed has no formula (stages 0 and 1).

    A pipeline's stage counts as a model of its own. The largest layer is the largest array of parameters in one layer.
    """
    zero, stages = step.config.zero_optimization, step.mesh.shape[PIPE]
    leaves = jax.tree.leaves(step.layouts)
    parameters = sum(prod(leaf.shape) for leaf in leaves if not leaf.state) // stages
    largest = max(prod(leaf.shape[1:] if leaf.stacked else leaf.shape) for leaf in leaves)
    offload, offload_params = zero.offload_optimizer.device == "cpu", zero.offload_param.device == "cpu"
    gpus = step.mesh.size // stages
    if zero.stage == 2:
        return zero2(parameters, gpus, offload=offload)
    if zero.stage == 3:
        return zero3(parameters, largest, gpus, offload=offload, offload_params=offload_params)
    return None


def bytes_by_stage(
    model: Model, config: Config | dict | str, *, devices: Sequence[jax.Device] | None = None
) -> dict[int, StateBytes]:
    """Compute the model-state bytes per device of a model under each ZeRO stage; nothing is compiled.

    Args:
      model, config: as for `jzero.make_train_step`; the config's own stage does not matter.
      devices: default `jax.devices()`; `gpu_devices` makes any number of them.

    Raises:
      ConfigError: a config that does not fit itself, the devices or the model.
    """
    config = Config.load(config)
    mesh = make_mesh(config, devices=devices)

    def at(stage: int) -> StateBytes:
        zero = config.zero_optimization.model_copy(update={"stage": stage})
        return state_bytes(make_train_step(model, config.model_copy(update={"zero_optimization": zero}), mesh=mesh))

    return {stage: at(stage) for stage in RULES}
