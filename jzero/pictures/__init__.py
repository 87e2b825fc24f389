"""Draws meshes, arrays and memory with matplotlib, and renders jzero's objects as HTML for notebooks.

matplotlib draws them: pip install 'jzero[plot]'. The HTML needs nothing.
"""

from jzero.pictures.arrays import draw_sharding
from jzero.pictures.memory import draw_memory
from jzero.pictures.mesh import draw_mesh

__all__ = ["draw_memory", "draw_mesh", "draw_sharding"]
