"""A model's functions on a group of devices: they take and return what one device holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jzero.mesh import CONTEXT, EXPERT, GROUP_AXES, TENSOR, group_size
from jzero.model import ENDS, STACK
from jzero.spread.interpreter import spread
from jzero.spread.sharded_array import ModelGroup, ShardedArray, undivided, whole
from jzero.tree import PyTree


def on_group(model: Any, mesh: Mesh, layouts: PyTree, attention: str = "auto", fp8: bool = False) -> Any:
    """Return the model for the group of devices to which this one belongs; the model itself if it is alone.

    Args:
      attention: how it runs on divided sequences, see `jzero.config.sections.ContextParallelConfig`.
      fp8: whether weights may arrive in fp8; then a single device is a group, too.
    """
    return SpreadModel(model, mesh, layouts, attention) if fp8 or group_size(mesh) > 1 else model


class SpreadModel:
    """The functions of a model, on shards: `prefix`, `block`, `suffix` and `loss`, and those that decode.

    Weights arrive as local shards, as their layouts say. The batch is the same on all devices of the group, and so are
    the results. What passes between the layers is a tree of `ShardedArray`s, with the sequence divided. Decoding passes
    arrays that are whole on every device, and a cache of `ShardedArray`s, which `tensor` may divide.
    """

    def __init__(self, model: Any, mesh: Mesh, layouts: PyTree, attention: str = "auto"):
        self.model, self._layouts = model, layouts
        # Dimension 1 of [rows, sequence, width]: `tensor` too, for Megatron's sequence parallelism (arXiv:2205.05198).
        degrees = {axis: mesh.shape[axis] for axis in GROUP_AXES}
        self.group = ModelGroup(degrees, {0: (EXPERT,), 1: (CONTEXT, TENSOR)}, attention)

    def __repr__(self) -> str:
        return repr(self.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prefix(self, ends: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._between_layers(self._run("prefix", self._weights(ENDS, ends), *self._tokens(args), **kwargs))

    def block(self, layer: PyTree, *args: PyTree) -> PyTree:
        return self._between_layers(self._run("block", self._weights(STACK, layer), *args))

    def suffix(self, ends: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._results(self._run("suffix", self._weights(ENDS, ends), *self._tokens(args), **kwargs))

    def loss(self, params: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._results(self._run("loss", self._weights(None, params), *self._tokens(args), **kwargs))

    def decode(self, params: PyTree, *args: PyTree) -> PyTree:
        logits, cache = self._run("decode", self._weights(None, params), *args)
        return self._results(logits), self._cached(args[-1], cache)

    def decode_prefix(self, ends: PyTree, *args: PyTree) -> PyTree:
        found = self._run("decode_prefix", self._weights(ENDS, ends), *args)
        if len(args) == 3:  # without a cache
            return self._results(found)
        return self._results(found[0]), self._cached(args[3], found[1])

    def decode_block(self, layer: PyTree, x: PyTree, cache: PyTree) -> tuple[PyTree, PyTree]:
        x, new = self._run("decode_block", self._weights(STACK, layer), x, cache)
        return self._results(x), self._cached(cache, new)

    def decode_suffix(self, ends: PyTree, *args: PyTree) -> PyTree:
        return self._results(self._run("decode_suffix", self._weights(ENDS, ends), *args))

    def divide(self, arrays: PyTree, like: PyTree) -> PyTree:
        """Divide arrays that are whole on every device as these are."""
        return jax.tree.map(lambda x, v: self.group.place(whole(x), v.dims), arrays, like)

    def _run(self, name: str, *args: PyTree, **kwargs: PyTree) -> PyTree:
        results = spread(getattr(self.model, name), self.group)(*args, **kwargs)
        self.group.traced.line, self.group.traced.primitive = "", name  # for what its results need
        return results

    def _weights(self, part: str | None, weights: PyTree) -> PyTree:
        layouts = self._layouts if part is None else self._layouts[part]

        def value(layout: Any, x: PyTree) -> ShardedArray:
            shape = tuple(n * self.group.degree(axes) for n, axes in zip(x.shape, layout.axes_by_dim, strict=True))
            return ShardedArray(x, shape, layout.axes_by_dim, weight=True)

        return jax.tree.map(value, layouts, weights)

    def _tokens(self, args: PyTree) -> PyTree:
        """Divide the rows of a batch over `expert`, and its tokens [rows, sequence] over `context`.

        So no device looks up all of them.
        """
        group = self.group

        def part(x: PyTree) -> PyTree:
            if isinstance(x, ShardedArray) or not jnp.ndim(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            is_tokens = jnp.ndim(x) == 2 and jnp.issubdtype(x.dtype, jnp.integer)
            wanted = [EXPERT, *[CONTEXT] * is_tokens]
            fits = [axis in group.degrees and group.fits(n, (axis,)) for n, axis in zip(x.shape, wanted, strict=False)]
            dims = [(axis,) if yes else () for axis, yes in zip(wanted, fits, strict=True)]
            return group.place(whole(x), (*dims, *undivided(jnp.ndim(x) - len(dims))))

        return _map(part, args)

    def _between_layers(self, result: PyTree) -> PyTree:
        """Return what goes to the next layer as it lies between layers, and a model's new state whole."""
        if getattr(self.model, "state", ()):
            x, new = result
            return self._in_activation_layout(x), self._results(new)
        return self._in_activation_layout(result)

    def _in_activation_layout(self, x: PyTree) -> PyTree:
        return _map(lambda v: self.group.in_activation_layout(v).activation, x)

    def _cached(self, before: PyTree, new: PyTree) -> PyTree:
        """Return a cache divided as it was before; one of arrays, over `tensor` as the pass left it."""

        def put(old: PyTree, v: ShardedArray) -> ShardedArray:
            v = self.group.summed(v)
            of_tensor = tuple((TENSOR,) if TENSOR in axes else () for axes in v.dims)
            return self.group.place(v, old.dims if isinstance(old, ShardedArray) else of_tensor).activation

        return _map(put, before, new)

    def _results(self, x: PyTree) -> PyTree:
        return _map(lambda v: self.group.undivided(v).x, x)


def _map(f: Callable[..., PyTree], *trees: PyTree) -> PyTree:
    return jax.tree.map(f, *trees, is_leaf=lambda x: isinstance(x, ShardedArray))
