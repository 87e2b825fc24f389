"""Bounds of a choice before it is compiled: the least memory and the least time it can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO, TRAIN
from jzero.mesh import make_mesh
from jzero.model import Model
from jzero.pipeline.schedules import PipelineSchedule, make_schedule
from jzero.planner import choices as keys
from jzero.planner.choices import Choice, merged, value_at
from jzero.planner.gpus import described_gpus, gpu_devices
from jzero.planner.named_models import Shapes
from jzero.planner.products import products
from jzero.planner.rates import Rates
from jzero.planner.state_bytes import state_bytes
from jzero.setup import with_stages
from jzero.train_step import TrainStep, make_train_step

# What of a choice decides the bytes of its model state.
_STATE = (keys.STAGE, keys.PIPE, keys.DATA, keys.ZERO, keys.CHUNKS, keys.OFFLOAD_OPTIMIZER, keys.OFFLOAD_PARAM)


@dataclass
class Bounds:
    """Lower bounds of choices for a model on a cluster; what they share is computed once.

    Attributes:
      raw: the config's dict, without the choices.
      model, shapes: the model, and the function from the global batch size to the shapes of a batch.
      kind, gpus, gpus_per_node: the cluster.
      rates: of its GPUs.
    """

    raw: Mapping[str, Any]
    model: Model
    shapes: Shapes
    kind: str
    gpus: int
    gpus_per_node: int
    rates: Rates
    _states: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _flops: dict[str, float] = field(default_factory=dict)
    _schedules: dict[tuple[Any, ...], tuple[PipelineSchedule, float]] = field(default_factory=dict)

    def memory(self, choice: Choice) -> int:
        """Return bytes that every step of the choice needs on the device."""
        key = *(choice.get(key) for key in _STATE), choice.get(ACCUM, 2) > 1
        if key not in self._states:
            self._states[key] = state_bytes(self._step(merged(self.raw, choice), self._devices(self.gpus))).least
        return self._states[key]

    def held(self, choice: Choice) -> float:
        """Return the micro-batches of whole models whose activations a device keeps at once."""
        found = self.schedule(choice)
        if found is None:
            return 1.0
        schedule = found[0]
        return float(schedule.in_flight.max()) / (schedule.stages * schedule.chunks)

    def schedule(self, choice: Choice) -> tuple[PipelineSchedule, float] | None:
        """Return the pipeline's schedule and the share of its time that a stage is busy; None without one."""
        if (stages := self.stages(choice)) == 1:
            return None
        names = (keys.SCHEDULE, ACCUM, keys.CHUNKS)
        name, accum, chunks = (choice.get(key) or value_at(self.raw, key) for key in names)
        asked = name, stages, accum, chunks
        if asked not in self._schedules:
            made = make_schedule(name or "1f1b", stages, accum, chunks or 1)
            self._schedules[asked] = made, 1 - made.bubble()
        return self._schedules[asked]

    def stages(self, choice: Choice) -> int:
        """Return the stages of the pipeline: those of the choice, or the config's."""
        return choice.get(keys.PIPE) or self._given

    @cached_property
    def _given(self) -> int:
        return Config.load(dict(self.raw)).mesh_degrees(self.gpus)["pipe"]

    def seconds(self, choice: Choice) -> float:
        """Return the time of the step's products at the full rate, recomputation and the pipeline's bubble included."""
        policy, schedule = choice.get(keys.POLICY) or value_at(self.raw, keys.POLICY) or "none", self.schedule(choice)
        if policy not in self._flops:
            self._flops[policy] = self._per_row(policy)
        busy = schedule[1] if schedule else 1.0
        return self._flops[policy] * value_at(self.raw, TRAIN) / self.gpus / dict(self.rates.products)["f16"] / busy

    @cached_property
    def layers(self) -> int:
        """The layers of the model's stack; 0 without one."""
        return self._step(self._alone(), self._devices(1)).setup.passes.facts.layers

    def _per_row(self, policy: str) -> float:
        """Count the FLOPs of one row of the batch, from a trace for one device."""
        step = self._step(merged(self._alone(), {keys.POLICY: policy}), gpu_devices(self.kind, 1))
        return products(step.trace(self.shapes(1))).flops

    def _alone(self) -> dict[str, Any]:
        """Return the config for one row on one device, without what only more devices can do."""
        sections = ("mesh", "tensor_parallel", "pipeline", "data_parallel_size")
        zero = {"stage": 0}
        kept = {key: value for key, value in self.raw.items() if key not in sections}
        return kept | {TRAIN: 1, MICRO: 1, ACCUM: 1, "zero_optimization": zero}

    def _devices(self, count: int) -> list[Any]:
        return described_gpus(self.kind, count, per_host=self.gpus_per_node)

    def _step(self, raw: Mapping[str, Any], devices: list[Any]) -> TrainStep:
        config = Config.load(dict(raw))
        mesh = make_mesh(with_stages(config, self.model, None), devices=devices)
        return make_train_step(self.model, config, mesh=mesh)
