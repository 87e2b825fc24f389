"""What DeepSpeed estimates before a run: `estimate_zero{2,3}_model_states_mem_needs` of version 0.18.

The formulas know the number of parameters, GPUs and the offload, and assume Adam in 16 bits. Activations, buffers and
the gathered parameters of stage 3 beyond the largest layer are not in them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import jax

from jzero.mesh import PIPE

if TYPE_CHECKING:
    from jzero.train_step import TrainStep


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
