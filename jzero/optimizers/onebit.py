"""DeepSpeed's 1-bit Adam, 0/1 Adam and 1-bit LAMB with exact communication: their arithmetic without compression.

Their point is to average signs with error feedback instead of gradients, for which the variance must not change any
more. Everything else about them is here: the variance freezes, no bias is corrected, weight decay is decoupled, and
1-bit LAMB goes on with the trust ratios of the warm-up. (Tang et al., 2021, arXiv:2102.02888; Lu et al., 2022,
arXiv:2202.06009; Li et al., 2021, arXiv:2104.06069; runtime/fp16/onebit/ in DeepSpeed.) Its first step only sets up
buffers; here it is a step like the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jzero.optimizers.transforms import Knobs, add_decay, scale_by_adam
from jzero.optimizers.wrappers import Transform, map_layers


def one_bit_adam(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Adam whose variance learns for `freeze_step` steps."""
    direction = scale_by_adam(k, p, bias_correction=False, learns=lambda count: count <= p["freeze_step"])
    return optax.chain(direction, add_decay(k, p), optax.scale_by_learning_rate(k.lr))


def zero_one_adam(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Adam whose variance learns ever more rarely, and for `var_freeze_step` steps at most."""
    ends = jnp.array(_interval_ends(p["var_update_scaler"]), jnp.int32)

    def learns(count: jax.Array) -> jax.Array:
        interval = jnp.int32(1) << (count > ends).sum()
        return (count % interval == 0) & (count <= p["var_freeze_step"])

    direction = scale_by_adam(k, p, bias_correction=False, learns=learns)
    return optax.chain(direction, add_decay(k, p), optax.scale_by_learning_rate(k.lr))


def _interval_ends(updates: int) -> list[int]:
    """Return the steps after which 0/1 Adam's interval doubles: each interval has that many updates.

    >>> _interval_ends(3)[:3]  # updates at 1, 2, 3; 4, 6, 8; 12, 16, 20
    [3, 8, 20]
    """
    ends, end, interval = [], 0, 1
    while (end := interval * (end // interval + updates)) < 2**31 - 1 and interval < 2**30:
        ends.append(end)
        interval *= 2
    return ends


class OneBitLambState(NamedTuple):
    """Adam's moments, with the variance `nu` of the warm-up and the `fresh` one; of every parameter (of a stack: of
    every layer) the moving average of its trust ratios, and the last factor on it."""

    count: jax.Array  # type: ignore[assignment]  # the name of a method of tuples
    mu: Any
    nu: Any
    fresh: Any
    ratio: Any
    factor: Any


class _Step(NamedTuple):
    update: Any
    ratio: Any
    factor: Any


def one_bit_lamb(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make LAMB that after `freeze_step` steps scales the average trust ratio by how much the variance has shrunk."""

    def init(params: Any) -> OneBitLambState:
        zeros = optax.tree.zeros_like
        ratio = map_layers(lambda w: jnp.zeros((), jnp.float32), k.stacked, params)
        factor = jax.tree.map(jnp.ones_like, ratio)
        return OneBitLambState(jnp.zeros([], jnp.int32), zeros(params), zeros(params), zeros(params), ratio, factor)

    def update(updates: Any, state: OneBitLambState, params: Any = None) -> tuple[Any, OneBitLambState]:
        b1, b2 = k.betas(p, state.count, updates)
        count = optax.safe_increment(state.count)
        warm = count <= p["freeze_step"]
        mu = jax.tree.map(lambda g, m, b: b * m + (1 - b) * g, updates, state.mu, b1)
        fresh = jax.tree.map(lambda g, v, b: b * v + (1 - b) * g * g, updates, state.fresh, b2)
        nu = jax.tree.map(lambda new, old: jnp.where(warm, new, old), fresh, state.nu)
        size = lambda v: jnp.sqrt(v) + p["eps"]  # noqa: E731
        plain = jax.tree.map(lambda m, v: m / size(v), mu, nu)
        decay = k.per_leaf("weight_decay", p["weight_decay"], mu)
        decayed = jax.tree.map(lambda u, w, d: u + d * w, plain, params, decay)
        shrunk = jax.tree.map(lambda v, f: size(v) / size(f), nu, fresh)

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
        of = lambda i: jax.tree.map(lambda s: s[i], steps, is_leaf=lambda s: isinstance(s, _Step))  # noqa: E731
        return of(0), OneBitLambState(count, mu, nu, fresh, of(1), of(2))

    return optax.chain(Transform(init, update), optax.scale_by_learning_rate(k.lr))
