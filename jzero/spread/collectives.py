"""Rules of a program's own collectives, over axes outside the group: a loss of all replicas, a pipeline's ends."""

from __future__ import annotations

from typing import Any

from jzero.spread.rules import bind, results, rule
from jzero.spread.value import Group, Value


@rule("psum", "ppermute")
def linear(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    """The sum of the parts is a part of the sum."""
    out = []
    for v, x, var in zip(values, bind(eqn, [v.x for v in values]), eqn.outvars, strict=True):
        out.append(Value(x, var.aval.shape, v.dims, v.partial))
    return out


@rule("pmax", "pmin")
def extreme(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    return linear(group, eqn, [group.summed(v) for v in values])


@rule("all_gather")
def all_gather(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    p, (v,) = eqn.params, values
    d = p["all_gather_dimension"]
    if p["tiled"]:
        v = group.gathered(v, d) if v.dims[d] else v
        return results(eqn, bind(eqn, [v.x]), v.dims, v.partial)
    return results(eqn, bind(eqn, [v.x]), (*v.dims[:d], (), *v.dims[d:]), v.partial)


@rule("reduce_scatter")
def reduce_scatter(group: Group, eqn: Any, values: list[Value]) -> list[Value]:
    p, (v,) = eqn.params, values
    d = p["scatter_dimension"]
    v = group.gathered(v, d) if v.dims[d] else v
    dims = v.dims if p["tiled"] else (*v.dims[:d], *v.dims[d + 1 :])
    return results(eqn, bind(eqn, [v.x]), dims, v.partial)
