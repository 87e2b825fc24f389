"""The rules of lookups (`table[indices]`, `jnp.take`, `jnp.take_along_axis`) and of updates (`table.at[indices]`)."""

from __future__ import annotations

from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from jzero.spread.rules import bind, everywhere, results, rule
from jzero.spread.value import Axes, Group, Value


@rule("gather")
def gather(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Look up along one dimension or several. A divided table stays, and each device finds those rows that it has.

    So embeddings and the logits of labels are vocabulary-parallel. What divides the indices divides the result.
    """
    p, n = eqn.params, eqn.params["dimension_numbers"]
    if not n.start_index_map or n.start_index_map != n.collapsed_slice_dims:
        return everywhere(group, eqn, values)
    table, indices = group.summed(values[0]), group.gathered(values[1], len(values[1].shape) - 1)
    rows = n.start_index_map
    windows = [d for d in range(len(table.shape)) if d not in (*rows, *n.operand_batching_dims)]
    cut = [d for d in windows if p["slice_sizes"][d] != table.shape[d]]
    dt: list[Axes] = [() if d in cut else axes for d, axes in enumerate(table.dims)]
    stay = {axis for d in (*rows, *windows) for axis in dt[d]}
    di: list[Axes] = [() if stay & set(axes) else axes for axes in indices.dims]
    for d, i in zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True):
        free = {axis for k, axes in enumerate(di) if k != i for axis in axes}
        axes = di[i] or (() if set(dt[d]) & (free | stay) else dt[d])
        dt[d] = di[i] = axes
    table, indices = group.place(table, tuple(dt)), group.place(indices, tuple(di))
    sizes = tuple(s if d in cut or d in rows else min(s, table.x.shape[d]) for d, s in enumerate(p["slice_sizes"]))
    window, batch = iter(windows), iter(di[:-1])
    ndim = len(eqn.outvars[0].aval.shape)
    dims = tuple(dt[next(window)] if d in n.offset_dims else next(batch) for d in range(ndim))
    partial = tuple(axis for d in rows for axis in dt[d])
    if not partial:
        weight = table.weight and indices.weight
        return results(eqn, bind(eqn, [table.x, indices.x], slice_sizes=sizes), dims, weight=weight)
    return results(eqn, [_own_rows(eqn, table, indices, sizes)], dims, partial)


def _own_rows(eqn: Any, table: Value, indices: Value, sizes: tuple[int, ...]) -> Any:
    """Look up the rows that this device has, and zeros for others."""
    n, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    at = [indices.x[..., i].astype(jnp.int32) for i in range(len(n.start_index_map))]
    divided = [(i, d) for i, d in enumerate(n.start_index_map) if table.dims[d]]
    mine, outside = jnp.bool_(True), jnp.bool_(False)
    for i, d in divided:
        if mode != lax.GatherScatterMode.FILL_OR_DROP:
            at[i] = jnp.clip(at[i], 0, table.shape[d] - 1)
        # Outside of the table the first device alone lets the primitive fill in its value.
        outside |= (at[i] < 0) | (at[i] >= table.shape[d])
        at[i] -= lax.axis_index(table.dims[d]) * table.x.shape[d]
        mine &= (at[i] >= 0) & (at[i] < table.x.shape[d])
    outside &= lax.axis_index(tuple(axis for _, d in divided for axis in table.dims[d])) == 0
    for i, d in divided:
        at[i] = jnp.where(mine, at[i], jnp.where(outside, table.x.shape[d], 0))
    # What the caller promised of the indices does not hold for these.
    promised = {"indices_are_sorted": False, "unique_indices": False}
    (found,) = bind(eqn, [table.x, jnp.stack(at, axis=-1)], slice_sizes=sizes, **promised)
    counts = mine | outside
    for d in n.offset_dims:
        counts = jnp.expand_dims(counts, d)
    return jnp.where(counts, found, jnp.zeros((), found.dtype))


_SCATTERS = ("scatter", *(f"scatter{mark}{kind}" for mark in "-_" for kind in ("add", "sub", "mul", "min", "max")))


@rule(*_SCATTERS)
def scatter(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Update along whole dimensions. Others may be divided, in the table as in the updates.

    Many updates that are added to a small table, as in the gradient of a lookup, stay where they are: each device adds
    its own, and the result is partial.
    """
    n = eqn.params["dimension_numbers"]
    table, updates = group.summed(values[0]), group.summed(values[2])
    indices = group.gathered(values[1], len(values[1].shape) - 1)
    forms: list[list[Axes]] = [[() for _ in v.shape] for v in (table, indices, updates)]
    dt, di, du = forms
    places = [u for u in range(len(updates.shape)) if u not in n.update_window_dims]  # of the indices' dimensions
    windows = [d for d in range(len(table.shape)) if d not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    taken: set[str] = set()

    def free(*choices: Axes) -> Axes:
        axes = next((axes for axes in choices if axes and not taken & set(axes)), ())
        taken.update(axes)
        return axes

    for d, u in zip(windows, n.update_window_dims, strict=True):
        if d not in n.scatter_dims_to_operand_dims and table.shape[d] == updates.shape[u]:
            dt[d] = du[u] = free(table.dims[d], updates.dims[u])
    for d, i in zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True):
        dt[d] = di[i] = du[places[i]] = free(table.dims[d], updates.dims[places[i]], indices.dims[i])
    partial: Axes = ()
    if eqn.primitive.name in ("scatter-add", "scatter_add") and prod(updates.shape) > prod(table.shape):
        for i, u in enumerate(places):
            if i not in n.scatter_indices_batching_dims:
                di[i] = du[u] = free(updates.dims[u], indices.dims[i])
                partial = (*partial, *di[i])
    x, *xs = (group.place(v, tuple(d)).x for v, d in ((table, dt), (indices, di), (updates, du)))
    if partial:
        x = jnp.where(lax.axis_index(partial) == 0, x, jnp.zeros((), x.dtype))
    return results(eqn, bind(eqn, [x, *xs]), tuple(dt), partial)
