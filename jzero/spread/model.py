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
from jzero.spread.value import Group, Value, whole
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
    the results. What passes between the layers is a tree of `Value`s, with the sequence divided. Decoding passes arrays
    that are whole on every device, and a cache of `Value`s, which `tensor` may divide.
    """

    def __init__(self, model: Any, mesh: Mesh, layouts: PyTree, attention: str = "auto"):
        self.model, self._layouts = model, layouts
        # Dimension 1 of [rows, sequence, width]: `tensor` too, for Megatron's sequence parallelism (arXiv:2205.05198).
        degrees = {axis: mesh.shape[axis] for axis in GROUP_AXES}
        self.group = Group(degrees, {0: (EXPERT,), 1: (CONTEXT, TENSOR)}, attention)

    def __repr__(self) -> str:
        return repr(self.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prefix(self, ends: Any, *args: Any, **kwargs: Any) -> Any:
        return self._passed_on(self._run("prefix", self._weights(ENDS, ends), *self._tokens(args), **kwargs))

    def block(self, layer: Any, *args: Any) -> Any:
        return self._passed_on(self._run("block", self._weights(STACK, layer), *args))

    def suffix(self, ends: Any, *args: Any, **kwargs: Any) -> Any:
        return self._results(self._run("suffix", self._weights(ENDS, ends), *self._tokens(args), **kwargs))

    def loss(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        return self._results(self._run("loss", self._weights(None, params), *self._tokens(args), **kwargs))

    def decode(self, params: Any, *args: Any) -> Any:
        logits, cache = self._run("decode", self._weights(None, params), *args)
        return self._results(logits), self._cached(args[-1], cache)

    def decode_prefix(self, ends: Any, *args: Any) -> Any:
        return self._results(self._run("decode_prefix", self._weights(ENDS, ends), *args))

    def decode_block(self, layer: Any, x: Any, cache: Any) -> Any:
        x, new = self._run("decode_block", self._weights(STACK, layer), x, cache)
        return self._results(x), self._cached(cache, new)

    def decode_suffix(self, ends: Any, *args: Any) -> Any:
        return self._results(self._run("decode_suffix", self._weights(ENDS, ends), *args))

    def divide(self, arrays: PyTree, like: PyTree) -> PyTree:
        """Divide arrays that are whole on every device as these `Value`s."""
        return jax.tree.map(lambda x, v: self.group.place(whole(x), v.dims), arrays, like)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        results = spread(getattr(self.model, name), self.group)(*args, **kwargs)
        self.group.ledger.line, self.group.ledger.primitive = "", name  # for what its results need
        return results

    def _weights(self, part: str | None, weights: Any) -> Any:
        layouts = self._layouts if part is None else self._layouts[part]

        def value(layout: Any, x: Any) -> Value:
            shape = tuple(n * self.group.degree(axes) for n, axes in zip(x.shape, layout.held, strict=True))
            return Value(x, shape, layout.held, weight=True)

        return jax.tree.map(value, layouts, weights)

    def _tokens(self, args: Any) -> Any:
        """Divide the rows of a batch over `expert`, and its tokens [rows, sequence] over `context`.

        So no device looks up all of them.
        """
        group = self.group

        def part(x: Any) -> Any:
            if isinstance(x, Value) or not jnp.ndim(x) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            is_tokens = jnp.ndim(x) == 2 and jnp.issubdtype(x.dtype, jnp.integer)
            wanted = {0: (EXPERT,), 1: (CONTEXT,) if is_tokens else ()}
            dims = [tuple(axis for axis in wanted.get(d, ()) if axis in group.degrees) for d in range(jnp.ndim(x))]
            dims = [axes if group.fits(size, axes) else () for size, axes in zip(x.shape, dims, strict=True)]
            return group.place(whole(x), tuple(dims))

        return _map(part, args)

    def _passed_on(self, result: Any) -> Any:
        """Return what goes to the next layer as it lies between layers, and a model's new state whole."""
        if getattr(self.model, "state", ()):
            x, new = result
            return self._rested(x), self._results(new)
        return self._rested(result)

    def _rested(self, x: Any) -> Any:
        def rest(v: Value) -> Value:
            v = self.group.rested(v)
            return Value(v.x, v.shape, v.dims)

        return _map(rest, x)

    def _cached(self, before: Any, new: Any) -> Any:
        """Return a cache divided as it was before; one of arrays, over `tensor` as the pass left it."""

        def put(old: Any, v: Value) -> Value:
            v = self.group.summed(v)
            dims = old.dims if isinstance(old, Value) else tuple((TENSOR,) if TENSOR in axes else () for axes in v.dims)
            v = self.group.place(v, dims)
            return Value(v.x, v.shape, v.dims)

        return jax.tree.map(put, before, new, is_leaf=lambda x: isinstance(x, Value))

    def _results(self, x: Any) -> Any:
        return _map(lambda v: self.group.undivided(v).x, x)


def _map(f: Callable[[Value], Any], tree: Any) -> Any:
    return jax.tree.map(f, tree, is_leaf=lambda x: isinstance(x, Value))
