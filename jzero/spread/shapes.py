"""Rules of primitives that change shapes, reduce, or work along some dimensions; of lookups and updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.kernels.trace import Equation
from jzero.spread.rules import bind, common, replicated, results, rule, run_local
from jzero.spread.sharded_array import Axes, Dims, ModelGroup, ShardedArray


@rule("reshape")
def reshape(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    v, new = values[0], eqn.params["new_sizes"]
    if 0 in v.shape or eqn.params.get("dimensions") is not None:
        return replicated(group, eqn, values)
    keep = list(v.dims)
    dims: list[Axes] = [()] * len(new)
    for old_dims, new_dims in _runs(v.shape, new):
        major = next((d for d in new_dims if new[d] != 1), None)
        for i, d in enumerate(d for d in old_dims if v.shape[d] != 1):
            # Divided along its major dimension, a run of dimensions stays divided along the major one of the new run.
            if v.dims[d] and i == 0 and major is not None and group.fits(new[major], v.dims[d]):
                dims[major] = v.dims[d]
            else:
                keep[d] = ()
    if tuple(keep) != v.dims:
        v = group.place(v, tuple(keep))
    return run_local(eqn, [v], tuple(dims), v.partial, new_sizes=group.local(new, tuple(dims)))


def _runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the shortest runs of dimensions that have the same number of elements.

    >>> _runs((6, 4, 1), (2, 3, 4))
    [([0], [0, 1]), ([1], [2]), ([2], [])]
    """
    pairs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        a, b = ([i] if i < len(old) else []), ([j] if j < len(new) else [])
        m, n = (old[i] if a else 1), (new[j] if b else 1)
        i, j = i + len(a), j + len(b)
        while m != n:
            if m < n:
                m, a, i = m * old[i], [*a, i], i + 1
            else:
                n, b, j = n * new[j], [*b, j], j + 1
        pairs.append((a, b))
    return pairs


@rule("broadcast_in_dim")
def broadcast_in_dim(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    if len(values) > 1:
        return replicated(group, eqn, values)
    v, shape = group.summed(values[0]), eqn.params["shape"]
    to = dict(zip(eqn.params["broadcast_dimensions"], v.dims, strict=True))
    dims = tuple(to.get(d, ()) for d in range(len(shape)))
    return run_local(eqn, [v], dims, shape=group.local(shape, dims))


@rule("transpose")
def transpose(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    (v,) = values
    return run_local(eqn, values, tuple(v.dims[d] for d in eqn.params["permutation"]), v.partial)


@rule("squeeze")
def squeeze(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    (v,) = values
    return run_local(eqn, values, _without(v.dims, eqn.params["dimensions"]), v.partial)


def _without(dims: Dims, gone: Sequence[int]) -> Dims:
    return tuple(axes for d, axes in enumerate(dims) if d not in gone)


@rule("reduce_sum")
def reduce_sum(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    (v,), over = values, eqn.params["axes"]
    return run_local(eqn, values, _without(v.dims, over), (*v.partial, *(axis for d in over for axis in v.dims[d])))


_COMBINE = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_and": jnp.all, "reduce_or": jnp.any}


@rule(*_COMBINE)
def reduce(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    v, over = group.summed(values[0]), eqn.params["axes"]
    divided = tuple(axis for d in over for axis in v.dims[d])

    def extreme(x: Any) -> Any:
        (x,) = bind(eqn, [x])
        for axis in divided:
            x = lax.all_gather(x, axis)
            group.traced.move("all-gather", axis, x.shape)
            x = _COMBINE[eqn.primitive.name](x, axis=0)
        return x

    if not divided or not jnp.issubdtype(v.x.dtype, jnp.inexact):
        return results(eqn, [extreme(v.x)], _without(v.dims, over))
    of_all = jax.custom_jvp(extreme)

    @of_all.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        """All elements that are the extreme share the derivative evenly, as in JAX, on whatever device they are."""
        (x,), (t,) = primals, tangents
        y = of_all(x)
        equal = (x == jnp.expand_dims(y, over)).astype(t.dtype)
        return y, lax.psum((t * equal).sum(over), divided) / lax.psum(equal.sum(over), divided)

    return results(eqn, [of_all(v.x)], _without(v.dims, over))


def _windowed(params: Mapping[str, Any]) -> list[int]:
    """List the dimensions along which windows are larger than an element, or skip or add some."""
    plain = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1, "padding": (0, 0)}
    given = [(params[name], value) for name, value in plain.items() if name in params]
    return [d for d in range(len(params["window_dimensions"])) if any(sizes[d] != value for sizes, value in given)]


def _cut(eqn: Equation) -> list[int]:
    """List the dimensions along which a `dynamic_slice` or an update is smaller than the array."""
    update = eqn.params["slice_sizes"] if "slice_sizes" in eqn.params else eqn.invars[1].aval.shape
    return [d for d, (part, size) in enumerate(zip(update, eqn.invars[0].aval.shape, strict=True)) if part != size]


_WINDOWS = (
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add", "select_and_gather_add",
)  # fmt: skip
# Primitives that work along some dimensions of arrays of one shape -> these dimensions.
_ALONG: dict[str, Callable[[Equation], Sequence[int]]] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), lambda e: [e.params["axis"]]),
    **dict.fromkeys(("concatenate", "sort"), lambda e: [e.params["dimension"]]),
    **dict.fromkeys(("reduce_prod", "argmax", "argmin"), lambda e: e.params["axes"]),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), _cut),
    **dict.fromkeys(_WINDOWS, lambda e: _windowed(e.params)),
    "pad": lambda e: [d for d, config in enumerate(e.params["padding_config"]) if any(config)],
    "rev": lambda e: e.params["dimensions"],
    "top_k": lambda e: [e.params.get("axis", len(e.invars[0].aval.shape) - 1)],
}


@rule(*_ALONG)
def along(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Along its dimensions the primitive gets whole arrays; others are divided alike. Numbers beside them are whole."""
    over, ndim = _ALONG[eqn.primitive.name](eqn), len(values[0].shape)
    values = [group.gathered(v, *over) if len(v.shape) == ndim else v for v in values]
    dims = common(values, ndim)
    placed = [group.place(v, dims) if len(v.shape) == ndim else group.undivided(v) for v in values]
    changed: dict[str, Any] = {}
    if "slice_sizes" in eqn.params:
        changed["slice_sizes"] = group.local(eqn.params["slice_sizes"], dims)
    keeps = len(eqn.outvars[0].aval.shape) == ndim
    return run_local(eqn, placed, dims if keeps else _without(dims, over), **changed)


@rule("split")
def split(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Along a divided dimension: gather, and divide the parts again, so that what follows is divided too."""
    v, d = group.summed(values[0]), eqn.params["axis"]
    parts = bind(eqn, [group.gathered(v, d).x])
    open_dims = (*v.dims[:d], (), *v.dims[d + 1 :])
    cut = [ShardedArray(x, o.aval.shape, open_dims, weight=v.weight) for x, o in zip(parts, eqn.outvars, strict=True)]
    return [_again(group, part, d, v.dims[d]) for part in cut]


def _again(group: ModelGroup, v: ShardedArray, d: int, axes: Axes) -> ShardedArray:
    """Divide a dimension that was gathered, if its new size allows it."""
    if not group.fits(v.shape[d], axes):
        return v
    return group.place(v, (*v.dims[:d], axes, *v.dims[d + 1 :]))


@rule("slice")
def slice_(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    p, (v,) = eqn.params, values
    ranges = zip(p["start_indices"], p["limit_indices"], p["strides"] or [1] * len(v.shape), v.shape, strict=True)
    cut = [d for d, (start, limit, stride, size) in enumerate(ranges) if (start, limit, stride) != (0, size, 1)]
    before, v = v.dims, group.gathered(v, *cut) if cut else v
    limits = tuple(limit if d in cut else v.x.shape[d] for d, limit in enumerate(p["limit_indices"]))
    (out,) = run_local(eqn, [v], v.dims, v.partial, limit_indices=limits)
    for d in cut:
        if before[d] and not out.axes & set(before[d]):
            out = _again(group, out, d, before[d])
    return [out]


@rule("stack")
def stack(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    values, d = [group.summed(v) for v in values], eqn.params["axis"]
    dims = common(values, len(values[0].shape))
    return run_local(eqn, [group.place(v, dims) for v in values], (*dims[:d], (), *dims[d:]))


# ------------------------------------------------------------------ lookups and updates
# `table[indices]`, `jnp.take`, `jnp.take_along_axis`; `table.at[indices]`.


@rule("gather")
def gather(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
    """Look up along one dimension or several. A divided table stays, and each device finds those rows that it has.

    So embeddings and the logits of labels are vocabulary-parallel. What divides the indices divides the result.
    """
    p, n = eqn.params, eqn.params["dimension_numbers"]
    if not n.start_index_map or n.start_index_map != n.collapsed_slice_dims:
        return replicated(group, eqn, values)
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
    if partial := tuple(axis for d in rows for axis in dt[d]):
        return results(eqn, [_own_rows(eqn, table, indices, sizes)], dims, partial)
    return run_local(eqn, [table, indices], dims, slice_sizes=sizes)


def _own_rows(eqn: Equation, table: ShardedArray, indices: ShardedArray, sizes: tuple[int, ...]) -> Any:
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
def scatter(group: ModelGroup, eqn: Equation, values: list[ShardedArray]) -> list[ShardedArray]:
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
