"""Plans a program for GPUs that this machine does not have: compiles it, reads its memory, collectives and time."""

from jzero.planner.collectives import Collective, Collectives, collectives
from jzero.planner.gpus import GPUS, described_gpus, gpu, gpu_devices
from jzero.planner.hlo import UnreadableProgram
from jzero.planner.memory import Live, Memory, live, memory
from jzero.planner.plan import Plan, plan
from jzero.planner.rates import Rates
from jzero.planner.state_bytes import StateBytes, bytes_by_stage, state_bytes
from jzero.planner.step_time import StepTime, step_time
from jzero.planner.traced_operations import Matmul, Matmuls, matmuls

__all__ = [
    "GPUS",
    "Collective",
    "Collectives",
    "Live",
    "Matmul",
    "Matmuls",
    "Memory",
    "Plan",
    "Rates",
    "StateBytes",
    "StepTime",
    "UnreadableProgram",
    "bytes_by_stage",
    "collectives",
    "described_gpus",
    "gpu",
    "gpu_devices",
    "live",
    "matmuls",
    "memory",
    "plan",
    "state_bytes",
    "step_time",
]  # fmt: skip
