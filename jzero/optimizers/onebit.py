"""DeepSpeed's 1-bit Adam. `onebit_lamb` and `zero_one` have 1-bit LAMB and 0/1 Adam.

The point of all three is to average signs with error feedback instead of gradients (`compressed`), for which the
variance must not change any more. So Adam runs for `freeze_step` steps; then the variance freezes, and the devices
average the signs of their momenta. No bias is corrected, and weight decay is decoupled. (Tang et al., 2021,
arXiv:2102.02888; runtime/fp16/onebit/adam.py in DeepSpeed 0.19.6.) DeepSpeed's first step only sets up buffers; here it
is a step like the others. With `exact_communication` the gradients are averaged.

One deviation: signs cannot say 0, so an element whose variance is 0 (the embedding of a token not seen so far) would
get a momentum of the scale of all, over eps. Its momentum is 0 here; DeepSpeed has `exp_avg_mask` to set by hand.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jzero.optimizers.compressed import Replicas, compressed_all_reduce, padded
from jzero.optimizers.transforms import Knobs, add_decay, first_moments, scale_by_adam, second_moments, where_learned
from jzero.optimizers.wrappers import Transform, map_layers, unzip


class CompressedAdamState(NamedTuple):
    """Adam's moments; every device's errors; the norm of the gradient, after `freeze_step` steps of a device's own."""

    count: jax.Array  # type: ignore[assignment]  # the name of a method of tuples
    mu: Any
    nu: Any
    worker_error: Any
    server_error: Any
    own_norm: jax.Array


class Averaged(NamedTuple):
    average: Any
    worker_error: Any
    server_error: Any


def scale_by_compressed_adam(k: Knobs, p: dict[str, Any], replicas: Replicas) -> Transform:
    """Scale by Adam's moments; after `freeze_step` steps the devices average the signs of their momenta.

    The updates are gradients with a row for each device, whose sum is the gradient. They are clipped here: by the norm
    of the sum, and once it is not known any more every device clips its own, as in DeepSpeed.
    """

    def init(params: Any) -> CompressedAdamState:
        zeros = optax.tree.zeros_like
        start = jnp.zeros([], jnp.int32), zeros(params), zeros(params)
        return CompressedAdamState(*start, *no_errors(k, replicas, params), jnp.zeros(replicas.size, jnp.float32))

    def update(updates: Any, state: CompressedAdamState, params: Any = None) -> tuple[Any, CompressedAdamState]:
        betas = k.betas(p, state.count, updates)
        count = optax.safe_increment(state.count)
        # The count is the same on all devices, so they take the same branch, and its collectives meet.
        state = lax.cond(
            count <= p["freeze_step"], partial(_exactly, replicas, betas), partial(_by_signs, k, replicas, betas),
            updates, state._replace(count=count),
        )  # fmt: skip
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + p["eps"]), state.mu, state.nu), state

    return Transform(init, update)


def _exactly(replicas: Replicas, betas: Any, updates: Any, state: CompressedAdamState) -> Any:
    """Move both moments by the gradient."""
    grads, norm = replicas.all_reduce(updates)
    mu, nu = first_moments(grads, state.mu, betas[0]), second_moments(grads, state.nu, betas[1])
    return state._replace(mu=mu, nu=nu, own_norm=norm)


def _by_signs(k: Knobs, replicas: Replicas, betas: Any, updates: Any, state: CompressedAdamState) -> Any:
    """Average the momenta that the devices' gradients give."""

    def of_device(own: Any, mu: Any) -> Any:
        updates, worker, server = own
        grads, norm = replicas.of_device(updates)
        mu, worker, server = average_leaves(k, replicas, first_moments(grads, mu, betas[0]), worker, server)
        return (worker, server, norm), mu

    own = updates, state.worker_error, state.server_error
    (worker, server, norm), mu = replicas.on_each(of_device, own, state.mu)
    mu = where_learned(state.nu, mu)
    return state._replace(mu=mu, worker_error=worker, server_error=server, own_norm=norm)


def no_errors(k: Knobs, replicas: Replicas, params: Any) -> tuple[Any, Any]:
    """Return the errors of `average_leaves` at first: the workers' and the servers'."""

    def error(parts: int) -> Any:
        def of(w: jax.Array) -> jax.Array:
            return jnp.zeros(padded(w.size, replicas.size) // parts, jnp.float32)

        return replicas.row_each(map_layers(of, k.stacked, params))

    return error(1), error(replicas.size)


def average_leaves(k: Knobs, replicas: Replicas, tree: Any, worker_error: Any, server_error: Any) -> Averaged:
    """Average every leaf, and every layer of a stacked one, by signs, inside of `replicas.on_each`."""

    def average(x: jax.Array, worker: jax.Array, server: jax.Array) -> Averaged:
        return Averaged(*compressed_all_reduce(x, worker, server, replicas.axes))

    return unzip(Averaged, map_layers(average, k.stacked, tree, worker_error, server_error))


def one_bit_adam(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Adam whose variance learns for `freeze_step` steps, after which its momentum is averaged by signs."""
    if k.replicas is not None:
        direction = scale_by_compressed_adam(k, p, k.replicas)
    else:
        direction = scale_by_adam(k, p, bias_correction=False, learns=lambda count: count <= p["freeze_step"])
    return optax.chain(direction, add_decay(k, p), optax.scale_by_learning_rate(k.lr))
