"""Profiles of a training step: its FLOPs by module."""

from jzero.profiling.flops import Module, StepFlops, step_flops

__all__ = ["Module", "StepFlops", "step_flops"]
