"""What goes around any transformation: one parameter per layer of a stack, and arithmetic in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

Transform: TypeAlias = optax.GradientTransformation


def per_layer(tx: Transform, stacked: Any) -> Transform:
    """`tx` that treats each layer of a stacked leaf as its own parameter: it is mapped over the leading axis.

    For transformations that look at one whole leaf at a time. Stacks must all have the same number of layers.

    Args:
      tx: any transformation.
      stacked: a tree of bool over the parameters (or a prefix of it), or None: `tx` as it is.

    >>> clip = per_layer(optax.clip_by_block_rms(1.0), {"stack": True, "end": False})
    >>> x = {"stack": jnp.array([[4.0, 4.0], [0.5, 0.5]]), "end": jnp.array([2.0, 2.0])}
    >>> clip.update(x, clip.init(x), x)[0]["stack"].tolist()
    [[1.0, 1.0], [0.5, 0.5]]
    """
    if stacked is None or not any(jax.tree.leaves(stacked)):
        return tx
    tx = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return jax.vmap(partial(tx.update, **extra))(updates, state, params)

    layered = optax.GradientTransformationExtraArgs(jax.vmap(tx.init), update)
    which = {True: "layers", False: "rest"}
    return optax.partition({"layers": layered, "rest": tx}, partial(labels, stacked, lambda s, p: which[s]))


def labels(stacked: Any, label: Callable[[bool, Any], str], params: Any) -> Any:
    """label(is stacked, leaf) for each parameter; `stacked` may be a prefix, or None for nothing stacked."""
    stacked = False if stacked is None else stacked
    return jax.tree.map(lambda s, part: jax.tree.map(lambda p: label(bool(s), p), part), stacked, params)


def in_fp32(tx: Transform, state_dtype: Any) -> Transform:
    """`tx` computing in fp32 for parameters of any dtype, its per-parameter state kept in `state_dtype`."""
    tx = optax.with_extra_args_support(tx)
    low = jnp.dtype(state_dtype) != jnp.float32

    def up(tree: Any) -> Any:
        return jax.tree.map(lambda x: _as_floating(x, jnp.promote_types(x.dtype, jnp.float32)), tree)

    def store(state: Any, params: Any) -> Any:
        return _map_owned(lambda x: _as_floating(x, state_dtype), state, params) if low else state

    def init(params: Any) -> Any:
        return store(tx.init(up(params)), params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        loaded = _map_owned(lambda x: _as_floating(x, jnp.float32), state, updates) if low else state
        new_updates, new_state = tx.update(up(updates), loaded, None if params is None else up(params), **extra)
        return new_updates, store(new_state, updates)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_floating(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _map_owned(function: Callable[[Any], Any], state: Any, params: Any) -> Any:
    """`function` on the state leaves that belong to a parameter: whose key path ends with the parameter's."""
    owners = {path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    lengths = {len(path) for path in owners}

    def leaf(path: tuple, x: Any) -> Any:
        return function(x) if any(path[len(path) - n :] in owners for n in lengths if n <= len(path)) else x

    return jax.tree_util.tree_map_with_path(leaf, state)
