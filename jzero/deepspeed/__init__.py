"""Checkpoints of DeepSpeed: read without PyTorch, as the state of a jzero run."""

from jzero.deepspeed.import_run import WEIGHTS_ALONE, DeepSpeedCheckpoint, Rename, find_deepspeed

__all__ = ["WEIGHTS_ALONE", "DeepSpeedCheckpoint", "Rename", "find_deepspeed"]
