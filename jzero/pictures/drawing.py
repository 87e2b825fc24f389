"""Draws a mesh, the parts of arrays on its devices, and the bytes of model state per device, with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jzero.display.figure import GRID, INK, PALE, SHARDS, WHITE, colour, new_figure, number_ranges
from jzero.display.text_table import size_text
from jzero.errors import ConfigError
from jzero.tree import PyTree, named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHOWN, ACROSS = 8, 16  # devices along one axis, and in a row; of more, the first and the last
BOX, GAP, GROUP = (0.8, 0.5), 0.07, 0.22  # inches


def draw_mesh(mesh: Mesh) -> Figure:
    """Draw the devices of a mesh on its named axes; axes of size 1 are left out.

    The outer axis goes down, the others to the right, the innermost in one group. Boxes of one colour hold the same
    shard of what is sharded over the innermost axis.

    Args:
      mesh: any mesh, also one of devices that are not there.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    names, devices = present_axes(mesh)
    down = names[:-1][:1]
    rows = drawn_indices(devices.shape[0]) if down else [0]
    across = names[len(down) :]
    grid = devices if down else devices[None]
    columns = _columns(grid.shape[1:])
    width = columns[-1][1] + BOX[0] if columns else BOX[0]
    left = 0.65 if down else 0.0
    headers = 0.22 * len(across)
    height = headers + len(rows) * (BOX[1] + GAP)
    figure = new_figure(max(left + width + 0.1, 3.2), height + 0.3, margin=0.08)
    from matplotlib.patches import FancyBboxPatch

    axes = figure.add_subplot(xlim=(-left, width + 0.05), ylim=(height, 0))
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(mesh_title(mesh), loc="left", fontsize=9, color=INK)
    _head(axes, across, columns)
    for line, row in enumerate(rows):
        top = headers + line * (BOX[1] + GAP)
        if down:
            _write(axes, -0.1, top + BOX[1] / 2, "⋮" if row is None else f"{down[0]} {row}", ha="right")
        for index, x in columns:
            if row is None or None in index:
                axes.text(x + BOX[0] / 2, top + BOX[1] / 2, "⋯" if row is not None else "⋮", ha="center", va="center")
                continue
            device = grid[(row, *index)]
            face, ink = (colour(index[-1] or 0), WHITE) if names else (PALE, INK)
            axes.add_patch(
                FancyBboxPatch((x, top), *BOX, "round,pad=0,rounding_size=0.07", facecolor=face, edgecolor="none")
            )
            _write(axes, x + BOX[0] / 2, top + BOX[1] / 2, device_label(device), color=ink)
    return figure


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, **{"fontsize": 7.5, "color": INK, "ha": "center", "va": "center", **style})


def mesh_title(mesh: Mesh) -> str:
    """Describe a mesh in a line: `8 x cpu = pipe 2 x zero 4`."""
    kind = getattr(mesh.devices.flat[0], "device_kind", "device")
    names, devices = present_axes(mesh)
    degrees = " x ".join(f"{name} {n}" for name, n in zip(names, devices.shape, strict=True))
    return f"{mesh.size} x {kind}" + (f" = {degrees}" if names else "")


def present_axes(mesh: Mesh) -> tuple[list[str], np.ndarray]:
    """Return the names of the axes whose size is more than one, and the devices along them."""
    kept = [(str(name), n) for name, n in mesh.shape.items() if n > 1]
    return [name for name, _ in kept], mesh.devices.reshape([n for _, n in kept])


def drawn_indices(size: int, most: int = SHOWN) -> list[int | None]:
    """List the indices along an axis that are drawn; None stands for those between.

    >>> drawn_indices(3), drawn_indices(512), drawn_indices(16, most=2)
    ([0, 1, 2], [0, 1, 2, 3, 4, 5, None, 511], [0, None, 15])
    """
    return [*range(size)] if size <= most else [*range(max(1, most - 2)), None, size - 1]


def device_label(device: jax.Device) -> str:
    """Name a device, and its process if it is not the first."""
    process = getattr(device, "process_index", 0)
    return f"device {device.id}" + (f"\nprocess {process}" if process else "")


def _columns(shape: tuple[int, ...]) -> list[tuple[tuple[int | None, ...], float]]:
    """List (the indices along the axes that go across, x in inches) of every column that is drawn."""
    if not shape:
        return [((), 0.0)]
    found: list[tuple[tuple[int | None, ...], float]] = []
    x = 0.0
    inner = _columns(shape[1:])
    span = inner[-1][1] + BOX[0] + (GROUP if len(shape) > 1 else GAP)
    for index in drawn_indices(shape[0], SHOWN if len(shape) == 1 else max(2, ACROSS // len(inner))):
        if index is None:
            found.append(((None,), x))
            x += BOX[0] + GAP
            continue
        found += [((index, *rest), x + at) for rest, at in inner]
        x += span
    return found


def _head(axes: Axes, names: list[str], columns: list[tuple[tuple[int | None, ...], float]]) -> None:
    """Write `data 0` above every group, and `zero 0` above every column."""
    for depth, name in enumerate(names):
        groups: dict[tuple[int | None, ...], list[float]] = {}
        for index, x in columns:
            if len(index) > depth and index[depth] is not None and None not in index[:depth]:
                groups.setdefault(index[: depth + 1], []).append(x)
        for index, found in groups.items():
            _write(axes, (found[0] + found[-1] + BOX[0]) / 2, 0.22 * depth + 0.1, f"{name} {index[-1]}")


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


def parts(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[tuple[int, int], dict[Part, list[int]]]:
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


def _panel(axes: Axes, name: str, x: jax.Array | jax.ShapeDtypeStruct) -> None:
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
        text = f"all {everyone}\ndevices" if whole else number_ranges(devices)
        upright = width * SIDE < 0.075 * len(text)
        if (height if upright else width) * SIDE > 0.05 * len(text):
            ink, angle = INK if whole else WHITE, 90 if upright else 0
            _write(axes, left + width / 2, top + height / 2, text, fontsize=8, color=ink, rotation=angle)
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    for dim, write in ((down, axes.set_ylabel), (across, axes.set_xlabel)):
        write(f"dimension {dim}: {shape[dim]:,}" if dim < len(x.shape) else "", fontsize=8, color=INK)
    held = x.sharding.shard_shape(tuple(x.shape))
    size = size_text(prod(held) * x.dtype.itemsize)
    axes.set_title(f"{name}\n{size} per device".strip(), fontsize=9, color=INK)


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


def draw_memory(bars: Mapping[int | str, Bytes], *, memory: int | None = None, title: str = "") -> Figure:
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
    for (name, sizes), face in zip(parts.items(), (SHARDS[2], SHARDS[1], SHARDS[0]), strict=True):
        axes.barh(names, sizes, left=left, height=0.66, color=face, label=name)
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
