"""Draws meshes, arrays and memory with matplotlib, and renders jzero's objects as HTML for notebooks.

matplotlib draws them: the extra `plot`. The HTML needs nothing.
"""

from jzero.pictures.drawing import draw_memory, draw_mesh, draw_sharding

__all__ = ["draw_memory", "draw_mesh", "draw_sharding"]
