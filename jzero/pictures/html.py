"""Renders jzero's objects as HTML for notebooks: tables, a mesh, the leaves of a tree. All text is escaped.

Styles are in the output of each cell, because a notebook keeps nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, Sharding

from jzero.display.figure import INK, PALE, WHITE, colour
from jzero.display.page import html_table, styled
from jzero.display.text_table import size_text
from jzero.pictures.drawing import device_label, drawn_indices, mesh_title, present_axes
from jzero.tree import PyTree, named

MOST_LEAVES = 40  # rows of a table
LEFT = "text-align:left"  # notebooks align cells to the right


def _cell(tag: str, content: object, style: str = LEFT) -> str:
    return f'<{tag} style="{style}">{escape(str(content))}</{tag}>'


def facts(values: Mapping[str, object]) -> str:
    """Format names and values as a table without titles."""
    rows = "".join(f"<tr>{_cell('th', name)}{_cell('td', value)}</tr>" for name, value in values.items())
    return f"<table><tbody>{rows}</tbody></table>"


def folded(summary: str, body: str) -> str:
    """Hide HTML behind a line that opens it."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def text(lines: str) -> str:
    """Show plain text as it is."""
    return f'<pre style="font-size:90%">{escape(lines)}</pre>'


def mesh(mesh: Mesh) -> str:
    """Show the devices of a mesh: the outer axis goes down, the others to the right.

    Devices of one colour hold the same shard of what is sharded over the innermost axis.
    """
    names, devices = present_axes(mesh)
    grid = devices.reshape(devices.shape[0], -1) if len(names) > 1 else devices.reshape(1, -1)
    inner = devices.shape[-1] if names else 1
    rows = []
    for row in drawn_indices(grid.shape[0]):
        if row is None:
            rows.append("<tr><td>⋮</td></tr>")
            continue
        cells = "".join(
            "<td>⋯</td>" if i is None else _box(grid[row, i], i % inner, names) for i in drawn_indices(grid.shape[1])
        )
        side = _cell("th", f"{names[0]} {row}") if len(names) > 1 else ""
        rows.append(f"<tr>{side}{cells}</tr>")
    return f"<div>{escape(mesh_title(mesh))}</div><table><tbody>{''.join(rows)}</tbody></table>"


def _box(device: jax.Device, shard: int, names: list[str]) -> str:
    face, ink = (colour(shard), WHITE) if names else (PALE, INK)
    return _cell("td", device_label(device), f"{LEFT};background:{face};color:{ink};border:2px solid {WHITE}")


def leaves(tree: PyTree, shardings: PyTree = None) -> str:
    """Tabulate the leaves of a tree of arrays or shapes: shape, dtype and, where they are sharded, spec and bytes.

    Args:
      shardings: of the leaves, if they do not carry their own.
    """
    found = named(tree)
    placed = named(shardings) if shardings is not None else {n: getattr(x, "sharding", None) for n, x in found.items()}
    on_devices = any(sharding is not None for sharding in placed.values())
    header = ["name", "shape", "dtype", *(["spec", "per device"] if on_devices else [])]
    rows: list[list[str]] = []
    total = held = 0
    for name, x in found.items():
        size, to = _itemsize(x), placed[name]
        n_bytes = prod(x.shape if to is None else to.shard_shape(tuple(x.shape))) * size
        total, held = total + x.size, held + n_bytes
        if len(rows) < MOST_LEAVES:
            row = [name, "×".join(map(str, x.shape)) or "scalar", str(x.dtype)]
            rows.append([*row, *([_spec(to), size_text(n_bytes)] if on_devices else [])])
    if len(found) > MOST_LEAVES:
        rows.append([f"… and {len(found) - MOST_LEAVES} more", *[""] * (len(header) - 1)])
    rows.append([f"{len(found)} leaves", f"{total:,}", "", *(["", size_text(held)] if on_devices else [])])
    return styled(html_table(header, rows))


def _itemsize(x: jax.Array) -> int:
    """Return the bytes of one element; of a random key, those of its data."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), x.dtype))
        return data.size * data.dtype.itemsize
    return x.dtype.itemsize


def _spec(sharding: Sharding | None) -> str:
    spec = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else f"P({', '.join(map(repr, spec))})"


def train_step(step: Any) -> str:
    """Show the mesh of a `TrainStep`, the arithmetic of its batch and the layout of its parameters."""
    b = step.batch_sizes
    about = {
        "model": repr(step.model),
        "ZeRO": f"stage {step.config.zero_optimization.stage}",
        "precision": step.config.precision_text,
        "batch": f"{b.train} = {b.micro} per device × {b.accum} accumulation × {step.replicas} replicas",
    }
    parameters = leaves(step.state_shapes.params, step.state_shardings.params)
    return mesh(step.mesh) + facts(about) + folded("layout of the parameters", parameters)


class ParametersInHTML:
    """Mixed into models: a notebook shows their name and their parameters, which no device needs to hold for that."""

    def _repr_html_(self) -> str:
        shapes = jax.eval_shape(lambda: self.init(jax.random.key(0)))  # type: ignore[attr-defined]
        size = sum(x.size for x in jax.tree.leaves(shapes))
        return f"<div><code>{escape(repr(self))}</code></div>" + folded(f"{size:,} parameters", leaves(shapes))
