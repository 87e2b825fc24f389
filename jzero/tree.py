"""Pytrees by name: the leaves' names, how two trees differ, and splitting a tree in two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jzero.errors import ConfigError, some_of


def path_name(path: tuple) -> str:
    """A key path as text: `stack/attention/wo/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named(tree: Any) -> dict[str, Any]:
    """name -> leaf, in the tree's order.

    Raises:
      ConfigError: two leaves of one name, as of {"a/b": ..., "a": {"b": ...}}.
    """
    leaves = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if len(result := dict(leaves)) < len(leaves):
        twice = sorted({name for name, _ in leaves if [n for n, _ in leaves].count(name) > 1})
        raise ConfigError(f"two leaves have the name {some_of(twice)}: a key must not hold a /")
    return result


def differences(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    """How named shapes differ from what is wanted (None: any shape), to say so.

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


def partition(leaves: Any, tree: Any) -> tuple[Any, Any]:
    """(trainable, frozen): the tree twice, with None in the other's places."""
    trainable = jax.tree.map(lambda leaf, x: x if leaf.trainable else None, leaves, tree)
    frozen = jax.tree.map(lambda leaf, x: None if leaf.trainable else x, leaves, tree)
    return trainable, frozen


def combine(leaves: Any, trainable: Any, frozen: Any) -> Any:
    """The inverse of `partition`."""
    return jax.tree.map(lambda leaf, t, f: t if leaf.trainable else f, leaves, trainable, frozen)
