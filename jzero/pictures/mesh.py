"""Draw a mesh: its devices as boxes, its axes as rows, columns and groups of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from jzero.display.figure import INK, PALE, WHITE, colour, new_figure

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
    rows = shown(devices.shape[0]) if down else [0]
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
    axes.set_title(title(mesh), loc="left", fontsize=9, color=INK)
    _head(axes, across, columns)
    for line, row in enumerate(rows):
        top = headers + line * (BOX[1] + GAP)
        if down:
            text = "⋮" if row is None else f"{down[0]} {row}"
            axes.text(-0.1, top + BOX[1] / 2, text, fontsize=7.5, color=INK, ha="right", va="center")
        for index, x in columns:
            if row is None or None in index:
                axes.text(x + BOX[0] / 2, top + BOX[1] / 2, "⋯" if row is not None else "⋮", ha="center", va="center")
                continue
            device = grid[(row, *index)]
            face = colour(index[-1] or 0) if names else PALE
            axes.add_patch(
                FancyBboxPatch((x, top), *BOX, "round,pad=0,rounding_size=0.07", facecolor=face, edgecolor="none")
            )
            ink = WHITE if names else INK
            axes.text(
                x + BOX[0] / 2, top + BOX[1] / 2, label(device), fontsize=7.5, color=ink, ha="center", va="center"
            )
    return figure


def title(mesh: Mesh) -> str:
    """Describe a mesh in a line: `8 x cpu = pipe 2 x zero 4`."""
    kind = getattr(mesh.devices.flat[0], "device_kind", "device")
    names, devices = present_axes(mesh)
    degrees = " x ".join(f"{name} {n}" for name, n in zip(names, devices.shape, strict=True))
    return f"{mesh.size} x {kind}" + (f" = {degrees}" if names else "")


def present_axes(mesh: Mesh) -> tuple[list[str], np.ndarray]:
    """Return the names of the axes whose size is more than one, and the devices along them."""
    kept = [(str(name), n) for name, n in mesh.shape.items() if n > 1]
    return [name for name, _ in kept], mesh.devices.reshape([n for _, n in kept])


def shown(size: int, most: int = SHOWN) -> list[int | None]:
    """List the indices along an axis that are drawn; None stands for those between.

    >>> shown(3), shown(512), shown(16, most=2)
    ([0, 1, 2], [0, 1, 2, 3, 4, 5, None, 511], [0, None, 15])
    """
    return [*range(size)] if size <= most else [*range(max(1, most - 2)), None, size - 1]


def label(device: Any) -> str:
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
    for index in shown(shape[0], SHOWN if len(shape) == 1 else max(2, ACROSS // len(inner))):
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
            middle = (found[0] + found[-1] + BOX[0]) / 2
            text = f"{name} {index[-1]}"
            axes.text(middle, 0.22 * depth + 0.1, text, fontsize=7.5, color=INK, ha="center", va="center")
