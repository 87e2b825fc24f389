"""Weights in and out: safetensors files of a checkpoint, of a run's parameters, and back."""

from jzero.weights.export import export
from jzero.weights.load import load
from jzero.weights.save import save

__all__ = ["export", "load", "save"]
