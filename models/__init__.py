"""Models in plain Flax, free of mesh and ZeRO code."""

from .named import config_from_hf, from_hf

__all__ = ["config_from_hf", "from_hf"]
