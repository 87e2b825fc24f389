"""Figures that show themselves in a notebook, and the colours of all pictures."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING

from jzero.errors import ConfigError, install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARDS = ("#1f5fbf", "#23804a", "#d9730d", "#8a4fbf", "#b8336a", "#11808a", "#8a6d1f", "#5b6470")
INK, GRID, PALE, WHITE = "#333333", "#d0d0d0", "#e8eaee", "#ffffff"
DOTS_PER_INCH = 100


def new_figure(width: float, height: float, margin: float = 0.04167) -> Figure:
    """Make an empty figure of a size in inches, with a margin around each of its plots.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ConfigError(f"pictures and plots need matplotlib: {install_command('plot')}") from error
    layout = ConstrainedLayoutEngine(w_pad=margin, h_pad=margin)
    return _picture(Figure)(figsize=(width, height), layout=layout)


@functools.cache
def _picture(figure: type[Figure]) -> type[Figure]:
    """Define the class on first use, because matplotlib is an extra."""

    class Picture(figure):  # type: ignore[misc, valid-type]
        def _repr_png_(self) -> bytes:
            """Draw for a notebook; a plain Figure is shown only where pyplot was imported before."""
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=DOTS_PER_INCH)
            return file.getvalue()

    return Picture


def colour(index: int) -> str:
    """Return the colour of a shard."""
    return SHARDS[index % len(SHARDS)]


def number_ranges(found: list[int], limit: int = 4) -> str:
    """Write numbers in a few characters.

    >>> number_ranges([0, 1, 2, 3]), number_ranges([1, 5]), number_ranges(list(range(0, 64, 2)))
    ('0-3', '1, 5', '0, 2, 4, … 62')
    """
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    if len(found) > limit:
        return f"{', '.join(map(str, found[: limit - 1]))}, … {found[-1]}"
    return ", ".join(map(str, found))
