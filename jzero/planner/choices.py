"""The choices that `jzero plan --search` compares: all values of the keys that a config leaves open.

A choice is {dotted key: value}. As in DeepSpeed's autotuner, a key that the config has keeps its value, unless that is
"auto".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jzero.config import Config
from jzero.config.sizes import ACCUM, MICRO, TRAIN
from jzero.errors import ConfigError
from jzero.planner.gpus import GPU

Choice = dict[str, Any]

STAGE, POLICY, UNROLL = "zero_optimization.stage", "activation_checkpointing.policy", "stack.unroll"
PIPE, DATA, ZERO = "mesh.pipe", "mesh.data", "mesh.zero"
SCHEDULE, CHUNKS = "pipeline.schedule", "pipeline.chunks"
OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM = "zero_optimization.offload_param.device"
POLICIES = ("none", "matmuls", "full")
# gpipe has 1f1b's bubble and more memory.
SCHEDULES = {"1f1b": (1,), "interleaved": (2, 4), "zero_bubble": (1, 2, 4)}  # with the numbers of chunks
_MESH = (
    PIPE, DATA, ZERO, "mesh.expert", "expert_parallel.autoep_size", "mesh.context", "sequence_parallel_size",
    "mesh.tensor", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "pipeline.stages",
    "zero_optimization.mics_shard_size",
)  # fmt: skip
_BFLOAT16 = (8, 0)  # the first compute capability with bfloat16 products


def value_at(raw: Mapping[str, Any], key: str) -> Any:
    """Look up a dotted key in a config's dict; None if it is not there."""
    for name in key.split("."):
        if not isinstance(raw, Mapping) or name not in raw:
            return None
        raw = raw[name]
    return raw


def is_open(raw: Mapping[str, Any], key: str) -> bool:
    """Return whether a config leaves a key to the search: it does not have the key, or has "auto"."""
    return value_at(raw, key) in (None, "auto")


def merged(raw: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """Return a config's dict with a choice in it."""
    made: dict[str, Any] = copy.deepcopy(dict(raw))
    for key, value in choice.items():
        *sections, name = key.split(".")
        at = made
        for section in sections:
            if not isinstance(at.get(section), dict):
                at[section] = {}
            at = at[section]
        at[name] = value
    return made


def lines(choice: Choice) -> str:
    """Write a choice in one line."""
    return ", ".join(f"{key} = {value}" for key, value in choice.items())


@dataclass(frozen=True)
class Space:
    """What there is to choose from.

    Attributes:
      raw: the config's dict.
      gpu, gpus, gpus_per_node: the cluster.
      layers: of the model's stack; 0 without one.
    """

    raw: Mapping[str, Any]
    gpu: GPU
    gpus: int
    gpus_per_node: int
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

    def choices(self) -> Iterator[Choice]:
        """Yield all choices on the device, the unrolled stack first; a choice has open keys only."""
        for mesh, experts, contexts in self._meshes():
            pipe, replicas = mesh[PIPE], mesh[DATA] * mesh[ZERO] * experts
            for stage in self._open(STAGE, (0, 1, 2, 3) if mesh[ZERO] * experts * contexts > 1 else (0,)):
                if mesh[DATA] > 1 and not stage:
                    continue  # the same program as with all replicas on `zero`
                for schedule in self._schedules(pipe):
                    for policy in self._open(POLICY, POLICIES):
                        for sizes in self._sizes(replicas):
                            made = {STAGE: stage, **mesh, **schedule, POLICY: policy, **sizes, **self.precision()}
                            yield {key: value for key, value in made.items() if is_open(self.raw, key)}

    def precision(self) -> Choice:
        """Return half precision, if the config has no precision: bf16, or fp16 on GPUs without it."""
        given = [value_at(self.raw, f"{name}.enabled") for name in ("bf16", "fp16")]
        if Config.load(dict(self.raw)).precision != "fp32" or False in given:
            return {}
        return {"bf16.enabled": True} if self.gpu.compute_capability >= _BFLOAT16 else {"fp16.enabled": True}

    def _open(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        return values if is_open(self.raw, key) else (value_at(self.raw, key),)

    def _meshes(self) -> Iterator[tuple[dict[str, int], int, int]]:
        """Yield pipe, data and zero: ZeRO over all replicas, or over those of one host; and expert and context."""
        if not all(is_open(self.raw, key) for key in _MESH):
            degrees = Config.load(self.raw).mesh_degrees(self.gpus)
            mesh = {key: degrees[key.removeprefix("mesh.")] for key in (PIPE, DATA, ZERO)}
            yield mesh, degrees["expert"], degrees["context"]
            return
        for pipe in (n for n in range(1, self.gpus + 1) if self.gpus % n == 0):
            if pipe > 1 and (not self.layers or self.layers % pipe):
                continue
            replicas = self.gpus // pipe
            yield {PIPE: pipe, DATA: 1, ZERO: replicas}, 1, 1
            if 1 < self.gpus_per_node < replicas and replicas % self.gpus_per_node == 0:
                yield {PIPE: pipe, DATA: replicas // self.gpus_per_node, ZERO: self.gpus_per_node}, 1, 1

    def _schedules(self, pipe: int) -> Iterator[Choice]:
        if pipe == 1:
            yield {}
            return
        for schedule in self._open(SCHEDULE, tuple(SCHEDULES)):
            for chunks in self._open(CHUNKS, SCHEDULES.get(schedule, (1,))):
                if self.layers % (pipe * chunks) == 0 or not is_open(self.raw, CHUNKS) or chunks == 1:
                    yield {SCHEDULE: schedule, CHUNKS: chunks}

    def _sizes(self, replicas: int) -> Iterator[Choice]:
        """Yield the micro-batches that divide the global batch, the largest first."""
        each, rest = divmod(self.rows, replicas)
        given = value_at(self.raw, MICRO), value_at(self.raw, ACCUM)
        for micro in () if rest else range(each, 0, -1):
            if each % micro or given[0] not in (None, "auto", micro) or given[1] not in (None, "auto", each // micro):
                continue
            yield {MICRO: micro, ACCUM: each // micro}
