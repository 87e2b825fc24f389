"""DeepSpeed's 1-bit LAMB.

LAMB for `freeze_step` steps. Then the variance freezes, the devices average the signs of their momenta, with error
feedback, and a step goes on with the average trust ratio of the warm-up, scaled by how much the variance, as the
averaged momenta show it, has shrunk. All momenta go in one vector with one scale, so each is brought to the same size
before. (Li et al., 2021, arXiv:2104.06069; runtime/fp16/onebit/lamb.py in DeepSpeed 0.19.6, without its first step,
which only sets up buffers.) No bias is corrected. With `exact_communication` the gradients are averaged.
Elements whose frozen variance is 0 have no momentum, as in `onebit`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jzero.optimizers.compressed import Replicas, compressed_all_reduce, padded
from jzero.optimizers.transforms import Knobs, first_moments, second_moments, where_learned
from jzero.optimizers.wrappers import Transform, map_layers, unzip


class OneBitLambState(NamedTuple):
    """Adam's moments, with the variance `nu` of the warm-up and the `fresh` one; of every parameter (of a stack: of
    every layer) the moving average of its trust ratios, the last factor on it, and the scale of its momentum in the
    common vector; every device's errors of that; the norm of the gradient, after the warm-up of the device's own.
    """

    count: jax.Array  # type: ignore[assignment]  # the name of a method of tuples
    mu: Any
    nu: Any
    fresh: Any
    ratio: Any
    factor: Any
    scale: Any
    worker_error: Any = None
    server_error: Any = None
    own_norm: Any = None


def one_bit_lamb(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make LAMB that after `freeze_step` steps scales the average trust ratio by how much the variance has shrunk."""

    def init(params: Any) -> OneBitLambState:
        zeros = optax.tree.zeros_like
        ratio = map_layers(lambda w: jnp.zeros((), jnp.float32), k.stacked, params)
        ones = jax.tree.map(jnp.ones_like, ratio)
        start = jnp.zeros([], jnp.int32), zeros(params), zeros(params), zeros(params)
        state = OneBitLambState(*start, ratio, factor=ones, scale=ones)
        if k.replicas is None:
            return state
        n = padded(sum(w.size for w in jax.tree.leaves(params)), k.replicas.size)
        worker, server = k.replicas.row_each((jnp.zeros(n, jnp.float32), jnp.zeros(n // k.replicas.size, jnp.float32)))
        return state._replace(
            worker_error=worker, server_error=server, own_norm=jnp.zeros(k.replicas.size, jnp.float32)
        )

    def update(updates: Any, state: OneBitLambState, params: Any = None) -> tuple[Any, OneBitLambState]:
        betas = k.betas(p, state.count, updates)
        count = optax.safe_increment(state.count)
        warm = count <= p["freeze_step"]
        state = state._replace(count=count)
        if k.replicas is None:
            state = _moved(betas, updates, state)
            # For a run that goes on compressed. No branch: the moments may lie in host memory.
            scale = jax.tree.map(partial(jnp.where, warm), _scales(k, state.mu), state.scale)
            state = state._replace(scale=scale)
        else:
            # The count is the same on all devices, so they take the same branch, and its collectives meet.
            exactly, by_signs = partial(_exactly, k, k.replicas, betas), partial(_by_signs, k, k.replicas, betas)
            state = lax.cond(warm, exactly, by_signs, updates, state)
        nu = jax.tree.map(lambda new, old: jnp.where(warm, new, old), state.fresh, state.nu)
        return _steps(k, p, warm, state._replace(nu=nu), params)

    return optax.chain(Transform(init, update), optax.scale_by_learning_rate(k.lr))


def _scales(k: Knobs, mu: Any) -> Any:
    """Return the factor of every momentum that brings all to one size, their mean."""
    sizes = map_layers(lambda m: jnp.sqrt(jnp.mean(m * m)), k.stacked, mu)
    leaves = jax.tree.leaves(sizes)
    common = sum(x.sum() for x in leaves) / sum(x.size for x in leaves)
    scales = jax.tree.map(lambda size: jnp.where(size > 0, common / jnp.where(size > 0, size, 1.0), 1.0), sizes)
    return jax.tree.map(lambda scale: scale.astype(jnp.float32), scales)


def _moved(betas: Any, grads: Any, state: OneBitLambState) -> OneBitLambState:
    """Move the moments by the gradient."""
    mu, fresh = first_moments(grads, state.mu, betas[0]), second_moments(grads, state.fresh, betas[1])
    return state._replace(mu=mu, fresh=fresh)


def _exactly(k: Knobs, replicas: Replicas, betas: Any, updates: Any, state: OneBitLambState) -> OneBitLambState:
    """Move the moments by the devices' summed gradient."""
    grads, norm = replicas.all_reduce(updates)
    state = _moved(betas, grads, state)
    return state._replace(own_norm=norm, scale=_scales(k, state.mu))


def _by_signs(k: Knobs, replicas: Replicas, betas: Any, updates: Any, state: OneBitLambState) -> OneBitLambState:
    """Average the momenta that the devices' gradients give; the fresh variance sees the gradient that they imply."""

    def of_device(own: Any, shared: Any) -> Any:
        updates, worker, server = own
        mu, scale = shared
        grads, norm = replicas.of_device(updates)
        scaled = map_layers(jnp.multiply, k.stacked, first_moments(grads, mu, betas[0]), scale)
        vector, tree = ravel_pytree(scaled)
        average, worker, server = compressed_all_reduce(vector, worker, server, replicas.axes)
        return (worker, server, norm), map_layers(jnp.divide, k.stacked, tree(average), scale)

    own = updates, state.worker_error, state.server_error
    (worker, server, norm), mu = replicas.on_each(of_device, own, (state.mu, state.scale))
    mu = where_learned(state.nu, mu)
    implied = jax.tree.map(lambda new, old, b: (new - b * old) / (1 - b), mu, state.mu, betas[0])
    fresh = second_moments(implied, state.fresh, betas[1])
    return state._replace(mu=mu, fresh=fresh, worker_error=worker, server_error=server, own_norm=norm)


class _Step(NamedTuple):
    update: Any
    ratio: Any
    factor: Any


def _steps(
    k: Knobs, p: dict[str, Any], warm: jax.Array, state: OneBitLambState, params: Any
) -> tuple[Any, OneBitLambState]:
    """Scale every parameter's direction: in the warm-up by its trust ratio, then by their average times a factor."""
    size = lambda v: jnp.sqrt(v) + p["eps"]  # noqa: E731
    plain = jax.tree.map(lambda m, v: m / size(v), where_learned(state.nu, state.mu), state.nu)
    decay = k.per_leaf("weight_decay", p["weight_decay"], plain)
    decayed = jax.tree.map(lambda u, w, d: u + d * w, plain, params, decay)
    shrunk = jax.tree.map(lambda v, f: size(v) / size(f), state.nu, state.fresh)

    def step(u: Any, before_decay: Any, w: Any, shrunk: Any, ratio: Any, factor: Any) -> _Step:
        u_norm, plain_norm, w_norm = (jnp.sqrt(jnp.sum(x * x)) for x in (u, before_decay, w))
        both = (u_norm > 0) & (w_norm > 0)
        trust = jnp.clip(w_norm / jnp.where(both, u_norm, 1.0), p["min_coeff"], p["max_coeff"])
        trust = jnp.where(both, trust, 1.0)
        moved = p["coeff_beta"] * ratio + (1 - p["coeff_beta"]) * trust
        part = jnp.where(u_norm > 0, jnp.minimum(1.0, plain_norm / jnp.where(u_norm > 0, u_norm, 1.0)), 1.0)
        now = jnp.clip(shrunk.max() * part + 1 - part, p["factor_min"], p["factor_max"])
        now = jnp.clip(now, factor * (1 - p["factor_threshold"]), factor * (1 + p["factor_threshold"]))
        scale = jnp.where(warm, trust, ratio * now)
        ratio = jnp.where(warm & (trust != 1), moved, ratio)
        return _Step(u * scale, ratio, jnp.where(warm, factor, now))

    steps = map_layers(step, k.stacked, decayed, plain, params, shrunk, state.ratio, state.factor)
    update, ratio, factor = unzip(_Step, steps)
    return update, state._replace(ratio=ratio, factor=factor)
