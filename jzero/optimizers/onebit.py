"""DeepSpeed's 1-bit Adam, 0/1 Adam and 1-bit LAMB.

Their point is to average signs with error feedback instead of gradients, for which the variance must not change any
more. 1-bit Adam does (`compressed`); with `exact_communication` it averages gradients as the other two do here. All
else is DeepSpeed's: the variance freezes, no bias is corrected, weight decay is decoupled, and 1-bit LAMB goes on with
the trust ratios of the warm-up. (Tang et al., 2021, arXiv:2102.02888; Lu et al., 2022,
arXiv:2202.06009; Li et al., 2021, arXiv:2104.06069; runtime/fp16/onebit/ in DeepSpeed.) Its first step only sets up
buffers; here it is a step like the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jzero.optimizers.compressed import Replicas, compressed_all_reduce, padded
from jzero.optimizers.transforms import Knobs, add_decay, scale_by_adam
from jzero.optimizers.wrappers import Transform, map_layers


class CompressedAdamState(NamedTuple):
    """Adam's moments; every device's errors; the norm of the gradient (from `freeze_step` on of the devices' own, as
    the root of the mean square)."""

    count: jax.Array  # type: ignore[assignment]  # the name of a method of tuples
    mu: Any
    nu: Any
    worker_error: Any
    server_error: Any
    norm: jax.Array


def scale_by_compressed_adam(k: Knobs, p: dict[str, Any], replicas: Replicas) -> Transform:
    """Scale by Adam's moments; after `freeze_step` steps the devices average the signs of their momenta.

    The updates are gradients with a row for each device, whose sum is the gradient. They are clipped here: by the norm
    of the sum, and once it is not known any more every device clips its own, as in DeepSpeed.
    """
    size, spec = replicas.size, replicas.spec

    def init(params: Any) -> CompressedAdamState:
        def error(parts: int) -> Any:
            def of(w: jax.Array) -> jax.Array:
                return jnp.zeros(padded(w.size, size) // parts, jnp.float32)

            errors = map_layers(of, k.stacked, params)
            return jax.tree.map(lambda e: jnp.broadcast_to(e, (size, *e.shape)), errors)

        zeros = optax.tree.zeros_like
        start = jnp.zeros([], jnp.int32), zeros(params), zeros(params)
        return CompressedAdamState(*start, error(1), error(size), jnp.zeros([], jnp.float32))

    def clipped(grads: Any) -> tuple[Any, jax.Array]:
        norm = optax.tree.norm(grads)
        if not replicas.clip:
            return grads, norm
        factor = jnp.where(norm > replicas.clip, replicas.clip / norm, 1.0)
        return jax.tree.map(lambda g: g * factor, grads), norm

    def update(updates: Any, state: CompressedAdamState, params: Any = None) -> tuple[Any, CompressedAdamState]:
        b1, b2 = k.betas(p, state.count, updates)
        count = optax.safe_increment(state.count)

        def moved(grads: Any, mu: Any) -> Any:
            return jax.tree.map(lambda g, m, b: b * m + (1 - b) * g, grads, mu, b1)

        def total(updates: Any) -> Any:
            summed = jax.tree.map(lambda g: lax.psum(g[0].astype(replicas.dtype), replicas.axes), updates)
            return jax.tree.map(lambda s, g: s.astype(g.dtype), summed, updates)

        def warm(updates: Any, state: CompressedAdamState) -> CompressedAdamState:
            run = jax.shard_map(total, mesh=replicas.mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
            grads, norm = clipped(run(updates))
            nu = jax.tree.map(lambda g, v, b: b * v + (1 - b) * g * g, grads, state.nu, b2)
            return state._replace(mu=moved(grads, state.mu), nu=nu, norm=norm)

        def of_device(updates: Any, mu: Any, worker: Any, server: Any) -> Any:
            updates, worker, server = jax.tree.map(lambda x: x[0], (updates, worker, server))
            grads, norm = clipped(jax.tree.map(lambda g: g * size, updates))

            def average(m: jax.Array, worker: jax.Array, server: jax.Array) -> _Averaged:
                return _Averaged(*compressed_all_reduce(m, worker, server, replicas.axes))

            results = map_layers(average, k.stacked, moved(grads, mu), worker, server)
            mu, worker, server = (_field(results, i) for i in range(3))
            worker, server = jax.tree.map(lambda x: x[None], (worker, server))
            return mu, worker, server, jnp.sqrt(lax.pmean(norm * norm, replicas.axes))

        def compressed(updates: Any, state: CompressedAdamState) -> CompressedAdamState:
            rows, whole = spec, PartitionSpec()
            run = jax.shard_map(
                of_device, mesh=replicas.mesh, in_specs=(rows, whole, rows, rows),
                out_specs=(whole, rows, rows, whole), check_vma=False,
            )  # fmt: skip
            mu, worker, server, norm = run(updates, state.mu, state.worker_error, state.server_error)
            return state._replace(mu=mu, worker_error=worker, server_error=server, norm=norm)

        # The count is the same on all devices, so they take the same branch, and its collectives meet.
        state = lax.cond(count <= p["freeze_step"], warm, compressed, updates, state._replace(count=count))
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + p["eps"]), state.mu, state.nu), state

    return Transform(init, update)


class _Averaged(NamedTuple):
    average: Any
    worker_error: Any
    server_error: Any


def _field(results: Any, index: int) -> Any:
    """Return one field of a tree of named tuples."""
    return jax.tree.map(lambda r: r[index], results, is_leaf=lambda r: isinstance(r, _Averaged | _Step))


def one_bit_adam(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Adam whose variance learns for `freeze_step` steps, after which its momentum is averaged by signs."""
    if k.replicas is not None:
        direction = scale_by_compressed_adam(k, p, k.replicas)
        return optax.chain(direction, add_decay(k, p), optax.scale_by_learning_rate(k.lr))
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
        update, ratio, factor = (_field(steps, i) for i in range(3))
        return update, OneBitLambState(count, mu, nu, fresh, ratio, factor)

    return optax.chain(Transform(init, update), optax.scale_by_learning_rate(k.lr))
