"""Pytrees by name: the names of leaves, differences between two trees, splitting one tree into two, casts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.errors import ConfigError, some_of

PyTree = Any
"""Any nesting of dicts, lists, tuples and registered dataclasses with arrays (or layouts, specs, ...) as leaves."""


def path_name(path: tuple) -> str:
    """Format a key path as text: `stack/attention/wo/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leading_dim(tree: PyTree) -> int:
    """Return the leading dimension that all arrays of a batch or a layer stack share."""
    return jax.tree.leaves(tree)[0].shape[0]


def named(tree: PyTree) -> dict[str, Any]:
    """Map the name of every leaf to the leaf, in the tree's order.

    Raises:
      ConfigError: two leaves share a name, as in {"a/b": ..., "a": {"b": ...}}.
    """
    leaves = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if len(result := dict(leaves)) < len(leaves):
        twice = sorted({name for name, _ in leaves if [n for n, _ in leaves].count(name) > 1})
        raise ConfigError(f"two leaves have the name {some_of(twice)}: a key must not contain a /")
    return result


def differences(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    """List how named shapes differ from the wanted ones (None: any shape), one line each.

    >>> differences({"a": (4,), "b": (2, 3)}, {"a": (8,), "c": (2, 3)})
    ['missing c (2, 3)', 'extra b (2, 3)', 'a is (4,), not (8,)']
    """
    missing = [
        f"missing {name}" + (f" {shape}" if shape is not None else "")
        for name, shape in wanted.items()
        if name not in found
    ]
    extra = [f"extra {name} {shape}" for name, shape in sorted(found.items()) if name not in wanted]
    others = [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if shape is not None and found.get(name, shape) != shape
    ]
    return missing + extra + others


def partition(tree: PyTree, keep: PyTree) -> tuple[PyTree, PyTree]:
    """Split a tree into (kept, rest) by a tree of bools; each has None in the other's places.

    >>> partition({"w": 1, "ids": 2}, {"w": True, "ids": False})
    ({'ids': None, 'w': 1}, {'ids': 2, 'w': None})
    """
    kept = jax.tree.map(lambda keep, x: x if keep else None, keep, tree)
    rest = jax.tree.map(lambda keep, x: None if keep else x, keep, tree)
    return kept, rest


def combine(kept: PyTree, rest: PyTree) -> PyTree:
    """Invert `partition`.

    >>> combine({"w": 1, "ids": None}, {"w": None, "ids": 2})
    {'ids': 2, 'w': 1}
    """
    return jax.tree.map(lambda a, b: b if a is None else a, kept, rest, is_leaf=lambda x: x is None)


def replaced(values: Sequence[Any], at: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return a list with new values at some indices.

    >>> replaced("abc", [2, 0], [1, 2])
    [2, 'b', 1]
    """
    found = dict(zip(at, new, strict=True))
    return [found.get(i, x) for i, x in enumerate(values)]


def cast(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a tree; the others stay as they are.

    >>> cast({"w": jnp.ones(2), "ids": jnp.arange(2)}, jnp.bfloat16)["w"].dtype
    dtype(bfloat16)
    """
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
