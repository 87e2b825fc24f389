"""The FLOPs of a step that count for MFU: forward and backward, without recomputation and a pipeline's idle ticks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jzero.mesh import PIPE, group_size, make_mesh
from jzero.pipeline.schedules import PipelineSchedule, make_schedule
from jzero.planner.products import BACKWARD, FORWARD, Walk
from jzero.tree import PyTree

if TYPE_CHECKING:
    from jzero.train_step import TrainStep


def useful_flops(step: TrainStep, traced: jax.stages.Traced, batch: PyTree) -> float | None:
    """Compute the useful FLOPs of one step on one device (Chowdhery et al., arXiv:2204.02311, appendix B).

    A pipeline's devices compute in idle ticks too, and a group's devices some things all alike, so their model is
    traced once more, on one device.

    Args:
      traced: the step's trace for the global batch `batch`.

    Returns:
      None for a `PipelineModule` of a fixed number of stages, which one device cannot run.
    """
    if step.mesh.shape[PIPE] == group_size(step.mesh) == 1:
        return _count(traced)
    if getattr(step.model, "num_stages", None):
        return None
    from jzero.train_step import make_train_step

    micro = step.batch_sizes.micro
    alone: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "trainable_parameters": step.config.trainable_parameters,
        "frozen_parameters": step.config.frozen_parameters,
    }
    if step.config.precision != "fp32":
        alone[step.config.precision] = {"enabled": True}
    mesh = make_mesh(devices=[step.mesh.devices.flat[0]])
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((micro, *x.shape[1:]), x.dtype), batch)
    one = make_train_step(step.model, {k: v for k, v in alone.items() if v}, mesh=mesh)
    return _count(one.trace(rows)) * step.batch_sizes.accum * step.replicas / step.mesh.size


def _count(traced: jax.stages.Traced) -> float:
    return sum(product.flops for product in Walk(traced).found if product.part in (FORWARD, BACKWARD))


def schedule_of(step: TrainStep) -> PipelineSchedule | None:
    """Return the schedule of the step's pipeline; None without one."""
    pipeline, stages = step.config.pipeline, step.mesh.shape[PIPE]
    if stages == 1:
        return None
    return make_schedule(pipeline.schedule, stages, step.batch_sizes.accum, pipeline.chunks)
