"""The methods and properties by which a Flax module describes itself."""

from __future__ import annotations

from typing import Any


def take_methods(model: Any, module: Any) -> None:
    """Copy the methods and properties that jzero reads from a module to its model."""
    for name in ("report_notes", "weights_layout", "fused_matrices", "vocabulary", "vocab_size", "make_cache"):
        if hasattr(module, name):
            setattr(model, name, getattr(module, name))
