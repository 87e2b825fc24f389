"""Computes the bytes of model state per device under every ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jzero.config import Config
from jzero.mesh import make_mesh
from jzero.model import Model
from jzero.planner.state_bytes import StateBytes, state_bytes
from jzero.train_step import make_train_step
from jzero.zero import RULES


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
