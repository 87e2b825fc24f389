"""The layers of a module: where their parameters lie, the conversion to {"ends", "stack"} and back, their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.adapters.cut import Arguments, scans_unrolled
from jzero.adapters.methods import Outcome
from jzero.errors import ConfigError, some_of
from jzero.model import ENDS, STACK
from jzero.tree import PyTree, named, path_name

Key = tuple[Any, ...]
LayerFunction = Callable[[PyTree, jax.Array | None, Arguments], Outcome]  # of (parameters, rng, arguments)


@dataclass(frozen=True)
class LayerPaths:
    """The places of the layers in nested dicts of parameters.

    Attributes:
      keys: of every layer, as ("encoder", "layers", 0); of the whole stack, if the module holds it as one.
      layers: their number.
      stacked: whether the module holds its layers as one stack, with a leading layer axis.
      collections: dicts besides the parameters in which the same keys occur: Linen's state.
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
        length = len(self.keys[0])
        ends: dict[Key, Any] = {}
        layers: dict[Key, dict[Key, Any]] = {key: {} for key in self.keys}
        for path, leaf in flatten_dict(params, keep_empty_nodes=True).items():
            n = self._beside(path)
            part = layers.get(path[n : n + length])
            if part is None:
                ends[path] = leaf
            else:
                part[(*path[:n], *path[n + length :])] = leaf
        trees = map(unflatten_dict, layers.values())
        if stack is None and self.stacked:
            stacked = next(trees)
        else:
            stacked = jax.tree.map(lambda *leaves: (stack or jnp.stack)(leaves), *trees)
        return {ENDS: unflatten_dict(ends), STACK: stacked}

    def join(self, params: PyTree) -> PyTree:
        """Undo `split`."""
        stack = params[STACK]
        layers = [stack] if self.stacked else [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(self.layers)]
        return self._joined(params[ENDS], layers)

    def join_alike(self, ends: PyTree, layer: PyTree) -> PyTree:
        """Make a module's parameters with those of one layer in every layer's place."""
        return self._joined(ends, [jax.tree.map(self._repeated, layer)] if self.stacked else [layer] * self.layers)

    def names(self, params: PyTree) -> dict[str, tuple[str, ...]]:
        """Map the names of a model's leaves to those that they have in the module: one, or one for each layer.

        Args:
          params: the module's, as arrays or ShapeDtypeStructs.
        """
        texts = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), params)
        split = self.split(texts, stack=_Names)
        return {name: tuple(x) if isinstance(x, _Names) else (x,) for name, x in named(split).items()}

    def _beside(self, path: Key) -> int:
        """Count the keys before a layer's: 1 in a collection."""
        return int(path[0] in self.collections)

    def _repeated(self, x: Any) -> Any:
        shape = (self.layers, *x.shape)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return jnp.broadcast_to(x, shape)

    def _joined(self, ends: PyTree, layers: Sequence[PyTree]) -> PyTree:
        leaves = flatten_dict(ends, keep_empty_nodes=True)
        for key, layer in zip(self.keys, layers, strict=True):
            for path, leaf in flatten_dict(layer, keep_empty_nodes=True).items():
                n = self._beside(path)
                leaves[(*path[:n], *key, *path[n:])] = leaf
        return unflatten_dict(leaves)


class _Names(tuple):
    """The names of the leaves that a stacked leaf consists of; a leaf itself."""


class Layers:
    """The equal layers of a module.

    Attributes:
      path: where they are, as the user wrote it.
      places: of their parameters.
    """

    path: str
    places: LayerPaths

    def name_of(self, number: int) -> str:
        return f"{self.path}[{number}]"

    def function(self, plain: Any) -> LayerFunction:
        """Make the pure function of one layer; `plain` is the model without a stack."""
        raise NotImplementedError

    def handing_over(self) -> AbstractContextManager[object]:
        """Return the context in which the layers give their calls to `cut.handler`."""
        return scans_unrolled(self.places.layers) if self.places.stacked else nullcontext()

    def advice(self, reason: str) -> str:
        """Show what to write if the layers cannot be cut out of the loss."""
        raise NotImplementedError


def layer_axis(leaves: Mapping[str, Any], what: str, fix: str) -> int:
    """Return the length of the layer axis that all leaves of a stacked module share.

    Raises:
      ConfigError: they share none; `what` and `fix` are the beginning and the end of the message.
    """
    lengths = {x.shape[:1]: name for name, x in leaves.items()}
    if len(lengths) != 1 or () in lengths:
        raise ConfigError(f"{what}, whose leaves {some_of(lengths.values())} have no common layer axis: {fix}")
    return next(iter(lengths))[0]
