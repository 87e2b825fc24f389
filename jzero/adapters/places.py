"""Where the layers lie among the parameters of a module, and the conversion to {"ends", "stack"} and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jzero.model import ENDS, STACK
from jzero.tree import PyTree, named, path_name

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Places:
    """The places of the layers in nested dicts of parameters.

    Attributes:
      keys: of every layer, as ("encoder", "layers", 0); of the whole stack, if the module holds it as one.
      layers: their number.
      stacked: whether the module holds its layers as one stack, with a leading layer axis.
      collections: dicts beside the parameters in which the same keys occur: Linen's state.
    """

    keys: tuple[Key, ...]
    layers: int
    stacked: bool = False
    collections: tuple[str, ...] = ()

    def split(self, params: PyTree, stack: Callable[[Sequence[Any]], Any] | None = None) -> PyTree:
        """Convert a module's parameters to those of a model with a layer stack.

        Args:
          stack: makes one leaf of the layers' leaves; default: `jnp.stack`.
        """
        ends, layers = _copy(params), []
        for key in self.keys:
            layer = dict(_pop(ends, key))
            for name in self.collections:
                if (state := _pop(ends, (name, *key))) is not None:
                    layer[name] = state
            layers.append(layer)
        if self.stacked:
            return {ENDS: ends, STACK: layers[0] if stack is None else jax.tree.map(lambda x: stack([x]), layers[0])}
        combine = stack or jnp.stack
        return {ENDS: ends, STACK: jax.tree.map(lambda *leaves: combine(leaves), *layers)}

    def join(self, params: PyTree) -> PyTree:
        """Undo `split`."""
        stack = params[STACK]
        layers = [stack] if self.stacked else [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(self.layers)]
        return self._joined(params[ENDS], layers)

    def join_alike(self, ends: PyTree, layer: PyTree) -> PyTree:
        """Make a module's parameters with those of one layer in every layer's place."""
        return self._joined(ends, [jax.tree.map(self._repeated, layer)] if self.stacked else [layer] * self.layers)

    def _repeated(self, x: Any) -> Any:
        shape = (self.layers, *x.shape)
        return (
            jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.broadcast_to(x, shape)
        )

    def _joined(self, ends: PyTree, layers: Sequence[PyTree]) -> PyTree:
        params = _copy(ends)
        for key, layer in zip(self.keys, layers, strict=True):
            own = {name: part for name, part in layer.items() if name not in self.collections}
            _put(params, key, own)
            for name in self.collections:
                if name in layer:
                    _put(params, (name, *key), layer[name])
        return params

    def names(self, params: PyTree) -> dict[str, tuple[str, ...]]:
        """Map the names of a model's leaves to those that they have in the module: one, or one for each layer.

        Args:
          params: the module's, as arrays or ShapeDtypeStructs.
        """
        texts = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), params)
        split = self.split(texts, stack=_Names)
        return {name: tuple(x) if isinstance(x, _Names) else (x,) for name, x in named(split).items()}


class _Names(tuple):
    """The names of the leaves that a stacked leaf consists of; a leaf itself."""


def _copy(tree: PyTree) -> PyTree:
    """Copy nested dicts, but not their leaves."""
    return {name: _copy(part) for name, part in tree.items()} if isinstance(tree, dict) else tree


def _pop(tree: PyTree, key: Key) -> Any:
    """Remove and return the part of a tree at a key, and every dict that is then empty; None if it is not there."""
    if len(key) == 1:
        return tree.pop(key[0], None)
    if key[0] not in tree:
        return None
    found = _pop(tree[key[0]], key[1:])
    if not tree[key[0]]:
        del tree[key[0]]
    return found


def _put(tree: PyTree, key: Key, part: Any) -> None:
    for name in key[:-1]:
        tree = tree.setdefault(name, {})
    tree[key[-1]] = part
