"""What a plan found: the facts that its text, its record and its page show."""

from __future__ import annotations

from dataclasses import dataclass, field

from jzero.batch import Amount
from jzero.pipeline.schedules import PipelineSchedule
from jzero.planner.collectives import Collectives
from jzero.planner.gpus import GPU
from jzero.planner.moves import Moves
from jzero.planner.plan_time import PlannedTime
from jzero.planner.planned_memory import PlannedMemory
from jzero.planner.useful_flops import schedule_of
from jzero.train_step import TrainStep


@dataclass(frozen=True)
class Measured:
    """What a run measured.

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
      time: the estimated speed, `time.step_s`; None where `time_problem` tells what the estimate could not read.
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
    moves: Moves
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
