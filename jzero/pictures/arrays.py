"""Draw which part of an array each device holds."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from jzero.display.figure import INK, PALE, WHITE, colour, new_figure, numbers
from jzero.tree import PyTree, named
from jzero.values.sizes import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Part = tuple[tuple[int, int], tuple[int, int]]  # begin and end, in the two dimensions that are drawn
SIDE = 2.2  # inches


def draw_sharding(arrays: PyTree, *, columns: int = 4) -> Figure:
    """Draw the parts of an array, each with the ids of the devices that hold it.

    Of an array with more than two dimensions, two are drawn: the sharded ones first, then the largest.

    Args:
      arrays: a `jax.Array` or a `ShapeDtypeStruct` with a sharding; or a tree of them, which get a panel each.
      columns: pictures in a row.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    panels = named(arrays)
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(columns * (SIDE + 0.35), rows * (SIDE + 0.7), margin=0.08)
    for place, (name, x) in enumerate(panels.items()):
        _panel(figure.add_subplot(rows, columns, place + 1), name, x)
    return figure


def parts(x: Any) -> tuple[tuple[int, int], dict[Part, list[int]]]:
    """Find (the two dimensions to draw, the ids of the devices that hold each part)."""
    shape = tuple(x.shape) + (1,) * (2 - len(x.shape))
    spans = {
        device.id: [span.indices(n)[:2] for span, n in zip((*index, *[slice(None)] * 2), shape, strict=False)]
        for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items()
    }
    divided = {d: len({held[d] for held in spans.values()}) > 1 for d in range(len(shape))}
    chosen = sorted(sorted(divided, key=lambda d: (not divided[d], -shape[d]))[:2])
    down, across = chosen
    found: dict[Part, list[int]] = {}
    for device in sorted(spans):
        found.setdefault((spans[device][down], spans[device][across]), []).append(device)
    return (down, across), found


def _panel(axes: Axes, name: str, x: Any) -> None:
    from matplotlib.patches import Rectangle

    (down, across), found = parts(x)
    shape = tuple(x.shape) + (1,) * (2 - len(x.shape))
    everyone = sum(map(len, found.values()))
    for number, ((rows, cols), devices) in enumerate(found.items()):
        left, top = cols[0] / shape[across], rows[0] / shape[down]
        width, height = (cols[1] - cols[0]) / shape[across], (rows[1] - rows[0]) / shape[down]
        whole = len(found) == 1 and everyone > 1
        axes.add_patch(
            Rectangle((left, top), width, height, facecolor=PALE if whole else colour(number), edgecolor=WHITE)
        )
        text = f"all {everyone}\ndevices" if whole else numbers(devices)
        upright = width * SIDE < 0.075 * len(text)
        if (height if upright else width) * SIDE > 0.05 * len(text):
            axes.text(
                left + width / 2, top + height / 2, text, fontsize=8, color=INK if whole else WHITE,
                ha="center", va="center", rotation=90 if upright else 0,
            )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    for dim, write in ((down, axes.set_ylabel), (across, axes.set_xlabel)):
        write(f"dimension {dim}: {shape[dim]:,}" if dim < len(x.shape) else "", fontsize=8, color=INK)
    held = x.sharding.shard_shape(tuple(x.shape))
    size = size_text(prod(held) * x.dtype.itemsize)
    axes.set_title(f"{name}\n{size} per device".strip(), fontsize=9, color=INK)
