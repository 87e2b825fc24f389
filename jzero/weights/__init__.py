"""Safetensors files: from a checkpoint (`export`), from a running program (`save`), and back (`load`)."""

from jzero.weights.export import export
from jzero.weights.load import load
from jzero.weights.save import save, save_adapters

__all__ = ["export", "load", "save", "save_adapters"]
