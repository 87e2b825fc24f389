"""The plan of a step that runs on the GPUs that are there, with what was measured beside it."""

from __future__ import annotations

from dataclasses import replace

import jax

from jzero.distributed.joining import host_of
from jzero.errors import ConfigError
from jzero.planner import gpus
from jzero.planner.plan import Plan, read_plan
from jzero.planner.plan_facts import Measured
from jzero.planner.rates import Rates
from jzero.planner.room import room_here
from jzero.train_step import TrainStep


def observed(step: TrainStep, step_s: float | None = None, rates: Rates | None = None) -> Plan:
    """Read the program of a step that ran, from JAX's cache.

    Args:
      step_s: measured seconds of a step.
      rates: of its GPUs, as for `plan`.

    Raises:
      ConfigError: the step did not run yet, or its devices are not in `GPUS`.
    """
    traced = step.traced
    if traced is None:
        raise ConfigError("html: the step did not run yet; call it once, or plan it with jzero.plan")
    devices = list(step.mesh.devices.flat)
    kind, nodes = gpus.kind_of(devices[0]), len({host_of(device) for device in devices})
    gpu = gpus.gpu(kind)
    plan = read_plan(
        step, traced.lower().compile(), traced, step.first.batch_shapes, gpu, nodes, len(devices) // nodes,
        room_here() or gpu.room(len(devices)), rates or Rates.of(kind), 0.0,
    )  # fmt: skip
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    return replace(plan, measured=Measured(step_s, max(peaks)))
