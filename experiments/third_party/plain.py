"""Train on one device with Flax and optax alone: what jzero's losses are compared with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.core import meta

STEPS = 4
KEY = 0


def train(written: Any, batch: Any, optimizer: optax.GradientTransformation) -> tuple[Any, list[float], Any]:
    """Return the values that training starts from, the loss of each step on the same batch, and the last values."""
    batch = jax.tree.map(jnp.asarray, batch)
    if not isinstance(written, tuple):
        return _functional(written.init(jax.random.key(KEY)), written.loss, batch, optimizer)
    module, loss_fn = written
    loop = _linen if isinstance(module, linen.Module) else _nnx
    return loop(module, loss_fn, batch, optimizer)


def _nnx(module: Any, loss_fn: Callable, batch: Any, optimizer: Any) -> tuple[Any, list[float], Any]:
    with nnx.use_eager_sharding(False):  # parameters with sharding annotations need no mesh then
        module = nnx.clone(module) if isinstance(module, nnx.Module) else module(nnx.Rngs(KEY))
    module.train()
    trained = nnx.LoRAParam if jax.tree.leaves(nnx.state(module, nnx.LoRAParam)) else nnx.Param
    start = jax.device_get(nnx.state(module, nnx.Not(nnx.RngState)))
    state = nnx.Optimizer(module, optimizer, wrt=trained)

    @nnx.jit
    def step(module: nnx.Module, state: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, trained))(module, batch)
        state.update(module, gradients)
        return loss

    losses = [float(step(module, state, batch)) for _ in range(STEPS)]
    return start, losses, jax.device_get(nnx.state(module, nnx.Not(nnx.RngState)))


def _linen(module: linen.Module, loss_fn: Callable, batch: Any, optimizer: Any) -> tuple[Any, list[float], Any]:
    takes_rng = len(inspect.signature(loss_fn).parameters) > 2

    def loss(module: Any, batch: Any) -> Any:
        return loss_fn(module, batch, jax.random.key(KEY)) if takes_rng else loss_fn(module, batch)

    def init_loss(module: Any, batch: Any) -> Any:
        return loss_fn(module, batch, None) if takes_rng else loss_fn(module, batch)

    start = meta.unbox(linen.init(init_loss, module)(jax.random.key(KEY), batch))
    rest = {name: values for name, values in start.items() if name != "params"}
    params, state = start["params"], optimizer.init(start["params"])

    @jax.jit
    def step(params: Any, rest: Any, state: Any, batch: Any) -> Any:
        def run(params: Any) -> Any:
            keys = {"dropout": jax.random.key(KEY), "params": jax.random.key(KEY)}
            apply = linen.apply(loss, module, mutable=list(rest))
            # Models that were written for pmap name the axis "batch" in their BatchNorm: here it has the size 1.
            one = jax.vmap(lambda b: apply({"params": params, **rest}, b, rngs=keys), axis_name="batch")
            value, changed = jax.tree.map(lambda x: x[0], one(jax.tree.map(lambda x: x[None], batch)))
            return value, {**rest, **changed}

        (value, rest), gradients = jax.value_and_grad(run, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), rest, state, value

    losses = []
    for _ in range(STEPS):
        params, rest, state, value = step(params, rest, state, batch)
        losses.append(float(value))
    return start, losses, {"params": params, **rest}


def _functional(start: Any, loss_fn: Callable, batch: Any, optimizer: Any) -> tuple[Any, list[float], Any]:
    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_fn)(params, batch, jax.random.key(KEY))
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    losses, params, state = [], start, optimizer.init(start)
    for _ in range(STEPS):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return start, losses, params
