"""Wrappers around any transformation: a parameter per layer of a stack, scaled updates, the parameters' average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jzero.tree import PyTree, path_name

Transform: TypeAlias = optax.GradientTransformation


def per_layer(tx: Transform, stacked: PyTree) -> Transform:
    """Map `tx` over the layer axis of stacked leaves, so that each layer is a parameter of its own.

    For transformations that look at one whole leaf at a time. All stacks must have the same number of layers, since one
    `vmap` runs over them together; state with no layer axis of its own, a step count, becomes one per layer.

    Args:
      tx: any transformation.
      stacked: a tree of bool over the parameters (or a prefix of it); None returns `tx` unchanged.

    Returns:
      The mapped transformation, with `tx` itself on the leaves that are not stacked.

    >>> clip = per_layer(optax.clip_by_block_rms(1.0), {"stack": True, "end": False})
    >>> x = {"stack": jnp.array([[4.0, 4.0], [0.5, 0.5]]), "end": jnp.array([2.0, 2.0])}
    >>> clip.update(x, clip.init(x), x)[0]["stack"].tolist()
    [[1.0, 1.0], [0.5, 0.5]]
    """
    if stacked is None or not any(jax.tree.leaves(stacked)):
        return tx
    tx = optax.with_extra_args_support(tx)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        return jax.vmap(partial(tx.update, **extra))(updates, state, params)

    layered = optax.GradientTransformationExtraArgs(jax.vmap(tx.init), update)
    which = {True: "layers", False: "rest"}
    return optax.partition({"layers": layered, "rest": tx}, partial(labels, stacked, lambda s, p: which[s]))


def labels(stacked: PyTree, label: Callable[[bool, Any], Any], params: PyTree) -> PyTree:
    """Map label(is stacked, leaf) over the parameters; `stacked` may be a prefix, or None for nothing stacked."""
    stacked = False if stacked is None else stacked
    return jax.tree.map(lambda s, part: jax.tree.map(lambda p: label(bool(s), p), part), stacked, params)


def map_layers(function: Callable[..., Any], stacked: PyTree, *trees: PyTree) -> PyTree:
    """Map `function` over the trees' leaves, and over each layer of a stacked leaf; `stacked` as in `labels`."""
    stacked = False if stacked is None else stacked
    layered = jax.vmap(function)
    return jax.tree.map(lambda s, *parts: jax.tree.map(layered if s else function, *parts), stacked, *trees)


def scale_updates(
    tx: Transform, scales: Mapping[str, float] = MappingProxyType({})
) -> optax.GradientTransformationExtraArgs:
    """Multiply the updates of the named parameters, and all of them by `lr_factor`, an argument of `update`.

    The factor is the learning rate over the one that `tx` has. The state keeps `tx`'s names, so checkpoints fit any
    scales.

    >>> tx = scale_updates(optax.sgd(0.5))
    >>> updates, _ = tx.update({"w": jnp.array(1.0)}, tx.init({"w": jnp.array(0.0)}), lr_factor=3.0)
    >>> float(updates["w"])
    -1.5
    """
    tx = optax.with_extra_args_support(tx)

    def scaled(path: tuple, update: jax.Array) -> jax.Array:
        return update * scales[name] if (name := path_name(path)) in scales else update

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, lr_factor: ArrayLike | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(updates, state, params, **extra)
        if scales:
            updates = jax.tree_util.tree_map_with_path(scaled, updates)
        if lr_factor is not None:
            updates = jax.tree.map(lambda u: u * jnp.asarray(lr_factor, u.dtype), updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(tx.init, update)


class EmaState(NamedTuple):
    """The wrapped optimizer's state, and the moving average of the parameters in float32."""

    inner: PyTree
    ema: PyTree


def with_ema(tx: optax.GradientTransformationExtraArgs, decay: float) -> optax.GradientTransformationExtraArgs:
    """Keep an exponential moving average of the parameters after every update, in the optimizer's state.

    ema <- decay * ema + (1 - decay) * parameters, from the initial parameters on.

    >>> tx = with_ema(optax.with_extra_args_support(optax.sgd(1.0)), 0.75)
    >>> state = tx.init({"w": jnp.array(4.0)})
    >>> _, state = tx.update({"w": jnp.array(4.0)}, state, {"w": jnp.array(4.0)})
    >>> float(state.ema["w"])
    3.0
    """

    def init(params: PyTree) -> EmaState:
        return EmaState(tx.init(params), jax.tree.map(lambda p: p.astype(jnp.float32), params))

    def update(updates: PyTree, state: EmaState, params: PyTree = None, **extra: Any) -> tuple[PyTree, EmaState]:
        updates, inner = tx.update(updates, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(jnp.float32), state.ema, new)
        return updates, EmaState(inner, ema)

    return optax.GradientTransformationExtraArgs(init, update)
