"""Compares two NNX modules in everything but their values."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jzero.tree import differences, named


def difference(a: nnx.Module, b: nnx.Module, name_a: str, name_b: str) -> str | None:
    """Describe the first difference between two modules: a class, a variable's shape, a hyperparameter; None: none."""
    if type(a) is not type(b):
        return f"{name_b} is a {type(b).__name__}, {name_a} a {type(a).__name__}"
    mine, others = ({f"{name_b}/{name}": tuple(x.shape) for name, x in _variables(module).items()} for module in (a, b))
    if problems := differences(others, mine):
        return f"{problems[0]} as in {name_a}"
    here, there = ({path: type(node).__name__ for path, node in _nodes(module).items()} for module in (a, b))
    for path in sorted(here.keys() | there.keys()):
        if here.get(path) != there.get(path):
            return f"{name_a}{path} is a {here.get(path)}, {name_b}{path} a {there.get(path)}"
    for path, node in _nodes(a).items():
        here, there = _settings(node), _settings(_nodes(b)[path])
        for key in sorted(here.keys() | there.keys()):
            if not _alike(here.get(key), there.get(key)):
                return f"{name_a}{path}/{key} is {here.get(key)!r}, {name_b}{path}/{key} is {there.get(key)!r}"
    return None


def _variables(module: nnx.Module) -> dict[str, Any]:
    return named(nnx.to_pure_dict(nnx.state(module, nnx.All(nnx.Variable, nnx.Not(nnx.RngState)))))


def _nodes(module: nnx.Module) -> dict[str, Any]:
    """Map the path of every module (or other nnx.Pytree) inside a module to it, as "/attention"; its own is empty."""
    nodes = ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree))
    return {"".join(f"/{part}" for part in path): node for path, node in nodes}


def _settings(node: Any) -> dict[str, Any]:
    """Return a node's attributes that are neither modules, variables, arrays nor random state."""
    inside = (nnx.Pytree, nnx.Variable, jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    own = {name: x for name, x in vars(node).items() if not name.startswith("_pytree__")}  # but not NNX's notes
    return {name: x for name, x in own.items() if not isinstance(x, inside)}


def _alike(a: Any, b: Any) -> bool:
    """Compare hyperparameters; functions by their code, since a layer's lambda is another object in every layer."""
    try:
        return _equal(a, b)
    except Exception:  # arrays, functions that refer to themselves, and whatever cannot be compared
        return False


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, functools.partial):
        return _equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if callable(a) and hasattr(a, "__code__"):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return a.__code__ == b.__code__ and _equal(cells[0], cells[1]) and _equal(a.__defaults__, b.__defaults__)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(a == b)
