"""A plan: its memory and time, which its text and its page show; and its record of JSON values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import prod
from typing import Any

import jax

from jzero.display.text_table import size_text
from jzero.errors import ConfigError
from jzero.mesh import PIPE
from jzero.pipeline.schedules import PipelineSchedule, make_schedule
from jzero.planner.collectives import Collectives, distinct
from jzero.planner.gpus import GPU, Cluster
from jzero.planner.memory import FRACTION, Live, Memory, UsableMemory, live, memory
from jzero.planner.state_bytes import state_bytes
from jzero.planner.step_time import StepTime
from jzero.planner.traced_operations import TracedCollectives
from jzero.step.batch import Amount
from jzero.step.train_step import TrainStep

PREALLOCATED_SHARE = 0.95  # of XLA's limit, from which it schedules a step to use less memory


ASSUMED = 0.10  # the relative error to expect where a rate is assumed
SCHEMA = 1
_SPEED = (
    "step_s", "uncertainty", "samples_per_s", "tokens_per_s", "tokens_per_s_gpu", "mfu", "useful_flops",
)  # fmt: skip
MOST_BUFFERS = 20


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes per GPU of a planned step.

    Attributes:
      parts: {part: bytes}; they add up to the peak. A part that is computed, not read from the program, never exceeds
        the temporaries that contain it.
      host_bytes: of host memory per GPU.
      xla: the compiler's own figures.
      live: the largest temporary buffers at the peak.
      usable: what the GPU has for XLA.
    """

    parts: dict[str, int]
    host_bytes: int
    xla: Memory
    live: Live
    usable: UsableMemory

    @property
    def peak_bytes(self) -> int:
        return self.xla.peak

    @property
    def fits(self) -> bool:
        """Return whether the peak fits into the GPU besides NCCL and CUDA, with XLA's fraction raised if need be."""
        return self.peak_bytes <= self.usable.most

    @property
    def verdict(self) -> str:
        return fit_verdict(self.peak_bytes, self.usable)


def fit_verdict(peak_bytes: int, usable: UsableMemory) -> str:
    """Say in one line whether a peak fits, and what XLA must be given for it."""
    peak, own = size_text(peak_bytes), size_text(usable.device - usable.most)
    if peak_bytes > usable.most:
        return f"does not fit: {peak} of at most {size_text(usable.most)}"
    if peak_bytes <= PREALLOCATED_SHARE * usable.preallocated:
        share = peak_bytes / usable.preallocated
        return f"fits: {peak} is {share:.0%} of the {size_text(usable.preallocated)} that XLA preallocates"
    if usable.most == usable.device:  # a device that is there, and what XLA has of it
        return f"fits: {peak} is {peak_bytes / usable.most:.0%} of the {size_text(usable.most)} that XLA has"
    fraction, given = int(100 * usable.limit / usable.device) / 100, size_text(usable.preallocated)
    return (
        f"fits if XLA may take more than its {given}: set {FRACTION}={fraction:.2f}, as planned; {own} are assumed "
        "for NCCL and CUDA"
    )


def planned_memory(step: TrainStep, compiled: jax.stages.Compiled, there: UsableMemory) -> PlannedMemory:
    """Divide the peak of a compiled step into parts."""
    state, xla = state_bytes(step), memory(compiled, step)
    temps = xla.temps
    parts = {"masters and optimizer state": state.persistent}
    if not state.host:
        parts = {"masters": state.masters, "optimizer state": state.optimizer}
    parts["batch and counters"] = xla.arguments - sum(parts.values())
    for name, size in (("compute parameters", state.parameters), ("gradients", state.gradients)):
        parts[name] = min(size, temps)
        temps -= parts[name]
    parts["activations and temporaries"] = temps
    parts["new outputs"] = xla.outputs - xla.aliased
    parts = {name: size for name, size in parts.items() if size}
    return PlannedMemory(parts, xla.host, xla, live(compiled.as_text() or ""), there)


@dataclass(frozen=True)
class Budget:
    """The days, GPU-hours and energy of training on a number of tokens.

    `cost` is in the unit of the price, None without one. `kwh` takes the cards' power limit all the time, and nothing
    for hosts, network and cooling.
    """

    tokens: float
    steps: int
    days: float
    gpu_hours: float
    kwh: float
    cost: float | None = None


@dataclass(frozen=True)
class PlannedTime:
    """The estimated time of a step.

    Attributes:
      step: where the time goes, see `step_time`.
      amount: samples and tokens of a global batch.
      useful_flops: of one GPU, see `useful_flops`; None if nothing tells.
      half: whether the products run in 16 bits.
      origin: of the rates that the estimate takes, "measured: ..." or "data sheet: ...".
    """

    step: StepTime
    amount: Amount
    useful_flops: float | None
    cluster: Cluster
    half: bool
    origin: str

    @property
    def step_s(self) -> float:
        return self.step.step_s

    @property
    def uncertainty(self) -> float:
        """The relative error to expect: 0.04 is 4 % either way. The rate of the links between hosts is assumed."""
        return max(self.step.uncertainty, ASSUMED if self.cluster.nodes > 1 else 0.0)

    @property
    def samples_per_s(self) -> float:
        return self.amount.samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.amount.tokens is None else self.amount.tokens / self.step_s

    @property
    def tokens_per_s_gpu(self) -> float | None:
        return None if self.tokens_per_s is None else self.tokens_per_s / self.cluster.gpus

    @property
    def mfu(self) -> float | None:
        """The share of the data sheet's FLOP/s that useful products reach, from 0 to 1."""
        return self.useful_flops and self.useful_flops / self.step_s / (1e12 * self.cluster.card.tflops[not self.half])

    def budget(self, tokens: float, price: float | None = None) -> Budget:
        """Compute what training on `tokens` takes.

        Args:
          price: of one GPU for one hour.

        Raises:
          ConfigError: the batch has no tokens that are known, or a number that is not positive.
        """
        if self.amount.tokens is None:
            raise ConfigError("tokens: the batch has none that the plan knows (integers of inputs [rows, length])")
        if not tokens > 0 or (price is not None and not price >= 0):
            raise ConfigError(f"tokens = {tokens}, price = {price}: must be positive numbers")
        steps = -(-tokens // self.amount.tokens)
        hours = steps * self.step_s / 3600
        used = hours * self.cluster.gpus
        kwh, cost = used * self.cluster.card.watts / 1000, None if price is None else used * price
        return Budget(tokens, int(steps), hours / 24, used, kwh, cost)


@dataclass(frozen=True)
class Measured:
    """The figures that a run measured.

    Attributes:
      step_s: seconds of a step, over the last ones; None before two have finished.
      peak_bytes: in use on the fullest device since the process began.
    """

    step_s: float | None
    peak_bytes: int


@dataclass(frozen=True, repr=False)
class PlanFacts:
    """A train step, compiled for GPUs that need not be there.

    Attributes:
      step: the step on the planned mesh.
      gpu, nodes, gpus_per_node: what it was planned for.
      amount: samples and tokens of a global batch.
      memory: bytes per GPU, part by part; `memory.peak_bytes`, `memory.fits`.
      collectives: every collective of a step.
      moves: what devices that act as one move, from the trace: with the model's modules and lines.
      time: the estimated speed, `time.step_s`; None where the estimate could not read the program: `time_problem`.
      warnings: what costs throughput or memory, each with its fix.
      deepspeed_bytes: DeepSpeed's own estimate of the model state per GPU for the same config; None for stages 0 and 1.
      text: the optimized program.
      compile_s: seconds that tracing and compiling took.
      measured: of a run of this step; None for a plan.
    """

    step: TrainStep
    gpu: GPU
    nodes: int
    gpus_per_node: int
    amount: Amount
    memory: PlannedMemory
    collectives: Collectives
    moves: TracedCollectives
    time: PlannedTime | None
    time_problem: str
    warnings: tuple[str, ...]
    deepspeed_bytes: int | None
    text: str = field(repr=False)
    compile_s: float
    measured: Measured | None = None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def schedule(self) -> PipelineSchedule | None:
        """The pipeline's schedule; None without one."""
        return schedule_of(self.step)

    def record(self, tokens: float | None = None, price: float | None = None) -> dict[str, Any]:
        """Return everything as JSON values; docs/plan.md documents the keys.

        Args:
          tokens: a budget to add, as for `PlannedTime.budget`.
          price: of one GPU for one hour.
        """
        budget = budget_of(self, tokens, price)
        gpu, step, sizes = self.gpu, self.step, self.step.batch_sizes
        memory, usable, time, schedule = self.memory, self.memory.usable, self.time, self.schedule
        layouts, ticks = jax.tree.leaves(step.layouts), ("name", "stages", "micro_batches", "chunks", "ticks")
        return {
            "schema": SCHEMA,
            "versions": {name: version(name) for name in ("jzero", "jax", "jaxlib")},
            "gpu": {
                "description": gpu.description, "count": self.gpus, "nodes": self.nodes,
                "gpus_per_node": self.gpus_per_node, "memory_bytes": gpu.memory, "tflops": gpu.tflops[0],
                "watts": gpu.watts, "source": gpu.source,
            },
            "layout": {
                "model": repr(step.model), "parameters": sum(prod(layout.shape) for layout in layouts),
                "stage": step.config.zero_optimization.stage, "precision": step.config.precision,
                "mesh": dict(step.mesh.shape), "tokens": self.amount.tokens,
                "batch": {
                    "global": sizes.train, "micro": sizes.micro, "accumulation": sizes.accum, "replicas": step.replicas,
                },
            },
            "memory": {
                "peak_bytes": memory.peak_bytes, "parts": dict(memory.parts), "host_bytes": memory.host_bytes,
                "preallocated_bytes": usable.preallocated, "usable_bytes": usable.most, "fits": memory.fits,
                "verdict": memory.verdict, "deepspeed_bytes": self.deepspeed_bytes, "temps_bytes": memory.xla.temps,
                "live_bytes": memory.live.peak_bytes, "live_at": memory.live.at,
                "live": [asdict(buffer) for buffer in memory.live.buffers[:MOST_BUFFERS]],
            },
            "collectives": [
                {"count": count, "times": row.times} | {name: v for name, v in asdict(row).items() if name != "op_name"}
                for row, count in distinct(self.collectives).items()
            ],
            "moves": [asdict(move) for move in self.moves.all],
            "whole_arrays": list(self.moves.whole),
            "time": time and {
                "rates": time.origin, **{name: getattr(time, name) for name in _SPEED},
                **{name: getattr(time.step, name) for name in ("compute_s", "exposed_s", "by", "exposed")},
            },
            "time_problem": self.time_problem or None,
            "budget": asdict(budget) if budget else None,
            "pipeline": schedule and {**{name: getattr(schedule, name) for name in ticks}, "bubble": schedule.bubble()},
            "parameters": [
                {
                    "name": layout.name, "shape": list(layout.shape),
                    "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in layout.spec],
                    "trainable": layout.trainable,
                }
                for layout in layouts
            ],
            "warnings": list(self.warnings),
            "compile_s": round(self.compile_s, 2),
        }  # fmt: skip


def budget_of(plan: PlanFacts, tokens: float | None, price: float | None) -> Budget | None:
    """Compute what a number of tokens takes; None without one or without an estimate of the time."""
    return plan.time.budget(tokens, price) if tokens is not None and plan.time else None


def schedule_of(step: TrainStep) -> PipelineSchedule | None:
    """Return the schedule of the step's pipeline; None without one."""
    pipeline, stages = step.config.pipeline, step.mesh.shape[PIPE]
    if stages == 1:
        return None
    return make_schedule(pipeline.schedule, stages, step.batch_sizes.accum, pipeline.chunks)
