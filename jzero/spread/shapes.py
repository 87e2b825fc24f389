"""Rules of primitives that change shapes, reduce, or work along some dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jzero.spread.rules import RULES, Rule, bind, common, everywhere, results, rule
from jzero.spread.value import Axes, Dims, Group, Value


@rule("reshape")
def reshape(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    v, new = values[0], eqn.params["new_sizes"]
    if 0 in v.shape or eqn.params.get("dimensions") is not None:
        return everywhere(group, eqn, values)
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
    local = group.local(new, tuple(dims))
    return results(eqn, bind(eqn, [v.x], new_sizes=local), tuple(dims), v.partial, v.weight)


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
def broadcast_in_dim(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    if len(values) > 1:
        return everywhere(group, eqn, values)
    v, shape = group.summed(values[0]), eqn.params["shape"]
    dims: list[Axes] = [()] * len(shape)
    for d, to in enumerate(eqn.params["broadcast_dimensions"]):
        dims[to] = v.dims[d]
    local = group.local(shape, tuple(dims))
    return results(eqn, bind(eqn, [v.x], shape=local), tuple(dims), weight=v.weight)


@rule("transpose")
def transpose(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    (v,) = values
    dims = tuple(v.dims[d] for d in eqn.params["permutation"])
    return results(eqn, bind(eqn, [v.x]), dims, v.partial, v.weight)


@rule("squeeze")
def squeeze(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    (v,) = values
    dims = _without(v.dims, eqn.params["dimensions"])
    return results(eqn, bind(eqn, [v.x]), dims, v.partial, v.weight)


def _without(dims: Dims, gone: Sequence[int]) -> Dims:
    return tuple(axes for d, axes in enumerate(dims) if d not in gone)


@rule("reduce_sum")
def reduce_sum(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    (v,), over = values, eqn.params["axes"]
    divided = tuple(axis for d in over for axis in v.dims[d])
    return results(eqn, bind(eqn, [v.x]), _without(v.dims, over), (*v.partial, *divided))


_COMBINE = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_and": jnp.all, "reduce_or": jnp.any}


@rule(*_COMBINE)
def reduce(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    v, over = group.summed(values[0]), eqn.params["axes"]
    divided = tuple(axis for d in over for axis in v.dims[d])

    def extreme(x: Any) -> Any:
        (x,) = bind(eqn, [x])
        for axis in divided:
            x = lax.all_gather(x, axis)
            group.ledger.move("all-gather", axis, x.shape)
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


@rule("reduce_prod", "argmax", "argmin")
def reduce_along(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    over = eqn.params["axes"]
    v = group.gathered(values[0], *over)
    return results(eqn, bind(eqn, [v.x]), _without(v.dims, over))


def _along(dimensions: Callable[[Any], Sequence[int]]) -> Rule:
    """Make the rule of a primitive that works along some dimensions of arrays of one shape."""

    def f(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
        values = [group.gathered(v, *dimensions(eqn)) for v in values]
        dims = common(values, len(values[0].shape))
        xs = bind(eqn, [group.place(v, dims).x for v in values])
        return results(eqn, xs, dims, weight=all(v.weight for v in values))

    return f


def _windowed(params: Any) -> list[int]:
    """List the dimensions along which windows are larger than an element, or skip or add some."""
    plain = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1, "padding": (0, 0)}
    given = [(params[name], value) for name, value in plain.items() if name in params]
    return [d for d in range(len(params["window_dimensions"])) if any(sizes[d] != value for sizes, value in given)]


RULES |= dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along(lambda e: [e.params["axis"]]))
RULES |= {
    "concatenate": _along(lambda e: [e.params["dimension"]]),
    "rev": _along(lambda e: e.params["dimensions"]),
    "sort": _along(lambda e: [e.params["dimension"]]),
    **dict.fromkeys(
        (
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_scatter_add",
            "select_and_gather_add",
        ),
        _along(lambda e: _windowed(e.params)),
    ),
    "top_k": _along(lambda e: [e.params.get("axis", len(e.invars[0].aval.shape) - 1)]),
}


@rule("split")
def split(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """Along a divided dimension: gather, and divide the parts again, so that what follows is divided too."""
    v, d = group.summed(values[0]), eqn.params["axis"]
    parts = bind(eqn, [group.gathered(v, d).x])
    open_dims = (*v.dims[:d], (), *v.dims[d + 1 :])
    cut = [Value(x, o.aval.shape, open_dims, weight=v.weight) for x, o in zip(parts, eqn.outvars, strict=True)]
    return [_again(group, part, d, v.dims[d]) for part in cut]


def _again(group: Group, v: Value, d: int, axes: Axes) -> Value:
    """Divide a dimension that was gathered, if its new size allows it."""
    if not group.fits(v.shape[d], axes):
        return v
    return group.place(v, (*v.dims[:d], axes, *v.dims[d + 1 :]))


@rule("slice")
def slice_(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    p, (v,) = eqn.params, values
    ranges = zip(p["start_indices"], p["limit_indices"], p["strides"] or [1] * len(v.shape), v.shape, strict=True)
    cut = [d for d, (start, limit, stride, size) in enumerate(ranges) if (start, limit, stride) != (0, size, 1)]
    before = v.dims
    if cut:
        v = group.gathered(v, *cut)
    limits = tuple(limit if d in cut else v.x.shape[d] for d, limit in enumerate(p["limit_indices"]))
    (x,) = bind(eqn, [v.x], limit_indices=limits)
    (out,) = results(eqn, [x], v.dims, v.partial, v.weight)
    for d in cut:
        if before[d] and not out.axes & set(before[d]):
            out = _again(group, out, d, before[d])
    return [out]


@rule("dynamic_slice")
def dynamic_slice(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    v, starts, sizes = values[0], [group.undivided(i).x for i in values[1:]], eqn.params["slice_sizes"]
    v = group.gathered(v, *(d for d, n in enumerate(sizes) if n != v.shape[d]))
    local = tuple(min(n, size) for n, size in zip(sizes, v.x.shape, strict=True))
    return results(eqn, bind(eqn, [v.x, *starts], slice_sizes=local), v.dims, weight=v.weight)


@rule("dynamic_update_slice")
def dynamic_update_slice(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    (v, update), starts = values[:2], [group.undivided(i).x for i in values[2:]]
    cut = [d for d, n in enumerate(update.shape) if n != v.shape[d]]
    v, update = (group.gathered(x, *cut) for x in (v, update))
    dims = common([v, update], len(v.shape))
    return results(eqn, bind(eqn, [group.place(v, dims).x, group.place(update, dims).x, *starts]), dims)


@rule("stack")
def stack(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    values, d = [group.summed(v) for v in values], eqn.params["axis"]
    dims = common(values, len(values[0].shape))
    return results(eqn, bind(eqn, [group.place(v, dims).x for v in values]), (*dims[:d], (), *dims[d:]))


@rule("pad")
def pad(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    padded = [d for d, config in enumerate(eqn.params["padding_config"]) if any(config)]
    v, filler = group.gathered(values[0], *padded), group.undivided(values[1])
    return results(eqn, bind(eqn, [v.x, filler.x]), v.dims)
