"""Draw the bytes of model state per device, a bar for each layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jzero.display.figure import GRID, INK, SHARDS, new_figure
from jzero.errors import ConfigError
from jzero.values.sizes import size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Bytes(Protocol):
    """Bytes per device, as in `jzero.planner.StateBytes`."""

    @property
    def persistent(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def gradients(self) -> int: ...
    @property
    def total(self) -> int: ...


def draw_memory(bars: Mapping[Any, Bytes], *, memory: int | None = None, title: str = "") -> Figure:
    """Draw the bytes of model state per device, without activations.

    Args:
      bars: the bytes by name, as from `jzero.planner.bytes_by_stage`, where the name is the stage.
      memory: of one device, in bytes; a line marks it.
      title: of the picture.

    Raises:
      ConfigError: there are no bars, or matplotlib is not installed.
    """
    if not bars:
        raise ConfigError("bars is empty: there is nothing to draw; pass {name: bytes}, as from planner.bytes_by_stage")
    parts = {
        "masters and optimizer state": [b.persistent for b in bars.values()],
        "gradients": [b.gradients for b in bars.values()],
        "compute parameters": [b.parameters for b in bars.values()],
    }
    names = [f"stage {name}" if isinstance(name, int) else str(name) for name in bars]
    longest = max(b.total for b in bars.values())
    figure = new_figure(7.2, 1.1 + 0.36 * len(bars), margin=0.08)
    limit = max(longest, memory or 0, 1) * 1.14  # a model without parameters has bars of no length
    axes = figure.add_subplot(xlim=(0, limit), ylim=(len(bars) - 0.5, -0.5))
    left = [0] * len(bars)
    for (name, sizes), colour in zip(parts.items(), (SHARDS[2], SHARDS[1], SHARDS[0]), strict=True):
        axes.barh(names, sizes, left=left, height=0.66, color=colour, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 0.01 * limit, row, size_text(total), fontsize=8, color=INK, va="center")
    if memory:
        axes.axvline(memory, color=INK, linestyle="--", linewidth=1, label=f"a device has {size_text(memory)}")
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.spines[:].set_visible(False)
    axes.spines["left"].set(visible=True, color=GRID)
    axes.set_title(title or "model state per device", loc="left", fontsize=9, color=INK)
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8)
    return figure
