"""Profiles of a training step: FLOPs by module, collectives, the times of a device's kernels, traces."""

from jzero.profiling.device_times import communication
from jzero.profiling.flops import Module, StepFlops, step_flops

__all__ = ["Module", "StepFlops", "communication", "step_flops"]
