"""The candidates of `jzero plan --search`, all values of the keys that a config leaves open; and their bounds.

A candidate is {dotted key: value}. As in DeepSpeed's autotuner, a key that the config has keeps its value, unless that
is "auto".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import jax

from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO, TRAIN
from jzero.errors import ConfigError
from jzero.mesh import resolve_mesh
from jzero.model import Model
from jzero.pipeline.schedules import make_schedule
from jzero.planner.gpus import Cluster, described_gpus, gpu_devices
from jzero.planner.named_models import RANK, Shapes, named_model
from jzero.planner.rates import Rates
from jzero.planner.state_bytes import state_bytes
from jzero.planner.traced_operations import matmuls
from jzero.step.train_step import TrainStep, make_train_step

Raw = Mapping[str, Any]  # a config's dict
Candidate = dict[str, Any]

STAGE, POLICY, UNROLL = "zero_optimization.stage", "activation_checkpointing.policy", "stack.unroll"
MESH_PIPE, MESH_DATA, MESH_ZERO = "mesh.pipe", "mesh.data", "mesh.zero"
SCHEDULE, CHUNKS = "pipeline.schedule", "pipeline.chunks"
OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM = "zero_optimization.offload_param.device"
POLICIES = ("none", "matmuls", "full")
# gpipe has 1f1b's bubble and more memory.
SCHEDULES = {"1f1b": (1,), "interleaved": (2, 4), "zero_bubble": (1, 2, 4)}  # with the numbers of chunks
_MESH = (
    MESH_PIPE, MESH_DATA, MESH_ZERO, "mesh.expert", "expert_parallel.autoep_size", "mesh.context",
    "sequence_parallel_size", "mesh.tensor", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size",
    "pipeline.stages", "zero_optimization.mics_shard_size",
)  # fmt: skip
_BFLOAT16 = (8, 0)  # the first compute capability with bfloat16 products
# What of a candidate decides the bytes of its model state.
_STATE = (STAGE, MESH_PIPE, MESH_DATA, MESH_ZERO, CHUNKS, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)


def value_at(raw: Raw, key: str) -> Any:
    """Look up a dotted key in a config's dict; None if it is not there."""
    for name in key.split("."):
        if not isinstance(raw, Mapping) or name not in raw:
            return None
        raw = raw[name]
    return raw


def is_open(raw: Raw, key: str) -> bool:
    """Return whether a config leaves a key to the search: it does not have the key, or has "auto"."""
    return value_at(raw, key) in (None, "auto")


def merged(raw: Raw, candidate: Candidate) -> dict[str, Any]:
    """Return a config's dict with a candidate in it."""
    made = copy.deepcopy(dict(raw))
    for key, value in candidate.items():
        *sections, name = key.split(".")
        at = made
        for section in sections:
            if not isinstance(at.get(section), dict):
                at[section] = {}
            at = at[section]
        at[name] = value
    return made


def keys_as_json(candidate: Candidate) -> str:
    """Write a candidate as keys of a config.

    >>> keys_as_json({"mesh.data": 1, "mesh.zero": 8})
    '"mesh": {"data": 1, "zero": 8}'
    """
    return json.dumps(merged({}, candidate))[1:-1]


def describe_candidate(raw: Raw, candidate: Candidate) -> str:
    """Describe a candidate in the field's words; `raw` has what the config keeps.

    >>> describe_candidate({"zero_optimization": {"stage": 2}}, {"mesh.zero": 8, MICRO: 2, ACCUM: 4})
    'ZeRO-2, zero 8, micro-batch 2 x 4, policy none'
    """

    def value(key: str) -> Any:
        return candidate.get(key, value_at(raw, key))

    axes = {key.removeprefix("mesh."): value(key) or 1 for key in (MESH_PIPE, MESH_DATA, MESH_ZERO)}
    chunks = f" of {value(CHUNKS)} chunks" if (value(CHUNKS) or 1) > 1 else ""
    words = {
        f"ZeRO-{value(STAGE) or 0}": True,
        **{f"{axis} {degree}": degree > 1 for axis, degree in axes.items()},
        f"micro-batch {value(MICRO)} x {value(ACCUM)}": True,
        f"{value(SCHEDULE) or '1f1b'}{chunks}": axes["pipe"] > 1,
        f"policy {value(POLICY) or 'none'}": True,
        "stack.unroll false": value(UNROLL) is False,
        "offload_optimizer": value(OFFLOAD_OPTIMIZER) == "cpu",
        "offload_param": value(OFFLOAD_PARAM) == "cpu",
    }
    return ", ".join(word for word, shown in words.items() if shown)


@dataclass(frozen=True)
class SearchSpace:
    """All candidates for a config on a cluster.

    Attributes:
      raw: the config's dict.
      layers: of the model's stack; 0 without one.
    """

    raw: Raw
    cluster: Cluster
    layers: int

    @property
    def rows(self) -> int:
        """The global batch.

        Raises:
          ConfigError: the config does not have it.
        """
        rows = value_at(self.raw, TRAIN)
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise ConfigError(f"{TRAIN} = {rows}: a search needs the global batch, a number of rows")
        return rows

    def candidates(self) -> Iterator[Candidate]:
        """Yield all candidates on the device, the unrolled stack first; a candidate has open keys only."""
        half = self.precision()
        for mesh, experts, contexts in self._meshes():
            several, replicas = mesh[MESH_ZERO] * experts * contexts > 1, mesh[MESH_DATA] * mesh[MESH_ZERO] * experts
            stages = self._open(STAGE, (0, 1, 2, 3) if several else (0,))
            policies, sizes = self._open(POLICY, POLICIES), self._sizes(replicas)
            for stage, schedule, policy, size in product(stages, self._schedules(mesh[MESH_PIPE]), policies, sizes):
                if mesh[MESH_DATA] > 1 and not stage:
                    continue  # the same program as with all replicas on `zero`
                made = {STAGE: stage, **mesh, **schedule, POLICY: policy, **size, **half}
                yield {key: value for key, value in made.items() if is_open(self.raw, key)}

    def precision(self) -> Candidate:
        """Return half precision, if the config has no precision: bf16, or fp16 on GPUs without it."""
        given = [value_at(self.raw, f"{name}.enabled") for name in ("bf16", "fp16")]
        if Config.load(dict(self.raw)).precision != "fp32" or False in given:
            return {}
        return {"bf16.enabled": True} if self.cluster.card.compute_capability >= _BFLOAT16 else {"fp16.enabled": True}

    def _open(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        return values if is_open(self.raw, key) else (value_at(self.raw, key),)

    def _meshes(self) -> Iterator[tuple[dict[str, int], int, int]]:
        """Yield pipe, data and zero: ZeRO over all replicas, or over those of one host; and expert and context."""
        if not all(is_open(self.raw, key) for key in _MESH):
            degrees = Config.load(self.raw).mesh_degrees(self.cluster.gpus)
            mesh = {key: degrees[key.removeprefix("mesh.")] for key in (MESH_PIPE, MESH_DATA, MESH_ZERO)}
            yield mesh, degrees["expert"], degrees["context"]
            return
        gpus, each = self.cluster.gpus, self.cluster.gpus_per_node
        for pipe in (n for n in range(1, gpus + 1) if gpus % n == 0):
            if pipe > 1 and (not self.layers or self.layers % pipe):
                continue
            replicas = gpus // pipe
            yield {MESH_PIPE: pipe, MESH_DATA: 1, MESH_ZERO: replicas}, 1, 1
            if 1 < each < replicas and replicas % each == 0:
                yield {MESH_PIPE: pipe, MESH_DATA: replicas // each, MESH_ZERO: each}, 1, 1

    def _schedules(self, pipe: int) -> Iterator[Candidate]:
        if pipe == 1:
            yield {}
            return
        for schedule in self._open(SCHEDULE, tuple(SCHEDULES)):
            for chunks in self._open(CHUNKS, SCHEDULES.get(schedule, (1,))):
                if self.layers % (pipe * chunks) == 0 or not is_open(self.raw, CHUNKS) or chunks == 1:
                    yield {SCHEDULE: schedule, CHUNKS: chunks}

    def _sizes(self, replicas: int) -> Iterator[Candidate]:
        """Yield the micro-batches that divide the global batch, the largest first."""
        each, rest = divmod(self.rows, replicas)
        given = value_at(self.raw, MICRO), value_at(self.raw, ACCUM)
        for micro in () if rest else range(each, 0, -1):
            accum = each // micro
            if not each % micro and given[0] in (None, "auto", micro) and given[1] in (None, "auto", accum):
                yield {MICRO: micro, ACCUM: accum}


@dataclass(frozen=True)
class Task:
    """A model, a cluster and a config; picklable, so that other processes can make its steps.

    Attributes:
      raw: the config's dict; what it has is kept, the keys that it leaves open are chosen.
      model, sequence, changes, adapters, rank: as for `named_model`.
      rates: of its GPUs.
    """

    raw: Raw
    model: str
    sequence: int
    changes: tuple[str, ...]
    cluster: Cluster
    rates: Rates
    adapters: str | None = None
    rank: int = RANK

    @property
    def named(self) -> tuple[Model, Shapes]:
        """The model, and the function from the global batch size to the shapes of a batch."""
        return named_model(self.model, self.sequence, self.changes, self.adapters, self.rank)


class Bounds:
    """Lower bounds of the candidates for a task; what they share is computed once."""

    def __init__(self, task: Task):
        self.task, self.raw, (self.model, self.shapes) = task, task.raw, task.named
        self._states: dict[tuple[object, ...], int] = {}
        self._flops: dict[str, float] = {}

    def memory(self, candidate: Candidate) -> int:
        """Return bytes that every step of the candidate needs on the device."""
        key = *(candidate.get(key) for key in _STATE), candidate.get(ACCUM, 2) > 1
        if key not in self._states:
            self._states[key] = state_bytes(
                self._step(merged(self.raw, candidate), self.task.cluster.described())
            ).least
        return self._states[key]

    def pipeline(self, candidate: Candidate) -> tuple[float, float]:
        """Return the micro-batches of whole models that a device keeps at once, and the share of time it is busy."""
        name, accum, chunks = (candidate.get(key) or value_at(self.raw, key) for key in (SCHEDULE, ACCUM, CHUNKS))
        return _held_and_busy(name or "1f1b", self.stages(candidate), accum, chunks or 1)

    def stages(self, candidate: Candidate) -> int:
        """Return the stages of the pipeline: those of the candidate, or the config's."""
        return candidate.get(MESH_PIPE) or self._given_stages

    @cached_property
    def _given_stages(self) -> int:
        return Config.load(dict(self.raw)).mesh_degrees(self.task.cluster.gpus)["pipe"]

    def seconds(self, candidate: Candidate) -> float:
        """Return the time of the step's products at the full rate, recomputation and the pipeline's bubble included."""
        policy = candidate.get(POLICY) or value_at(self.raw, POLICY) or "none"
        if policy not in self._flops:  # of one row of the batch, from a trace for one device
            step = self._step(merged(self._alone(), {POLICY: policy}), gpu_devices(self.task.cluster.gpu, 1))
            self._flops[policy] = matmuls(step.trace(self.shapes(1))).flops
        rate, busy = dict(self.task.rates.products)["f16"], self.pipeline(candidate)[1]
        return self._flops[policy] * value_at(self.raw, TRAIN) / self.task.cluster.gpus / rate / busy

    @cached_property
    def space(self) -> SearchSpace:
        layers = self._step(self._alone(), described_gpus(self.task.cluster.gpu, 1)).setup.passes.facts.layers
        return SearchSpace(self.raw, self.task.cluster, layers)

    def _alone(self) -> dict[str, Any]:
        """Return the config for one row on one device, without what only more devices can do."""
        sections = ("mesh", "tensor_parallel", "pipeline", "data_parallel_size")
        kept = {key: value for key, value in self.raw.items() if key not in sections}
        return kept | {TRAIN: 1, MICRO: 1, ACCUM: 1, "zero_optimization": {"stage": 0}}

    def _step(self, raw: Raw, devices: Sequence[jax.Device]) -> TrainStep:
        config = Config.load(dict(raw))
        config, mesh = resolve_mesh(config, self.model, devices=devices)
        return make_train_step(self.model, config, mesh=mesh)


@cache
def _held_and_busy(name: str, stages: int, micro_batches: int, chunks: int) -> tuple[float, float]:
    if stages == 1:
        return 1.0, 1.0
    made = make_schedule(name, stages, micro_batches, chunks)
    return float(made.in_flight.max()) / (stages * chunks), 1 - made.bubble()
