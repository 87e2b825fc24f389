"""DeepSpeed's 0/1 Adam: gradients averaged by signs in most steps, and local steps.

The variance learns from exact gradients in ever rarer steps; in the steps between, the devices average the signs of
their gradients. After `var_freeze_step` steps it is frozen, and every device takes local steps, by its own momentum.
The number of local steps between two averages doubles every `local_step_scaler` steps, up to `local_step_clipper`. Then
the devices average the signs of the sum of their steps, and take momentum and parameters from that. (Lu et al., 2022,
arXiv:2202.06009; runtime/fp16/onebit/zoadam.py in DeepSpeed 0.19.6, without its first step, which only sets up
buffers.) No bias is corrected, and weight decay is decoupled.
Elements whose variance is 0 have no momentum, as in `onebit`: they take the steps of weight decay alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jzero.optimizers.compressed import Replicas
from jzero.optimizers.onebit import average_leaves, no_errors
from jzero.optimizers.transforms import Knobs, first_moments, second_moments, where_learned
from jzero.optimizers.wrappers import Transform
from jzero.tree import PyTree


class ZeroOneAdamState(NamedTuple):
    """Adam's moments and the schedule's count; and of compressed communication rows, one for each device.

    Attributes:
      own_mu: what the device's momentum has beyond `mu`, from its gradients since the devices last averaged.
      own_steps: the sum of its steps since; it computes at the parameters plus this.
      own_rates: the sum of their learning rates.
      worker_error, server_error: of the compressed average.
      own_norm: the norm of the gradient; of the device's own where no other is known.
    """

    count: jax.Array  # type: ignore[assignment]  # the name of a method of tuples
    schedule: optax.ScaleByScheduleState
    mu: Any
    nu: Any
    own_mu: Any = None
    own_steps: Any = None
    own_rates: Any = None
    worker_error: Any = None
    server_error: Any = None
    own_norm: Any = None


def zero_one_adam(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make 0/1 Adam; without devices to average, Adam whose variance learns ever more rarely."""

    def init(params: Any) -> ZeroOneAdamState:
        zeros, count = optax.tree.zeros_like(params), jnp.zeros([], jnp.int32)
        state = ZeroOneAdamState(count, optax.ScaleByScheduleState(count), zeros, zeros)
        if k.replicas is None:
            return state
        rows, scalars = k.replicas.row_each(zeros), jnp.zeros(k.replicas.size, jnp.float32)
        return ZeroOneAdamState(*state[:4], rows, rows, scalars, *no_errors(k, k.replicas, params), scalars)

    def update(updates: Any, state: ZeroOneAdamState, params: Any = None) -> tuple[Any, ZeroOneAdamState]:
        rate = k.lr(state.schedule.count)
        if k.replicas is not None:  # a schedule's rate may be float64 under jax_enable_x64; the sum of rates is float32
            rate = jnp.asarray(rate, jnp.float32)
        step = _Step(k, p, k.betas(p, state.count, updates), rate)
        count = optax.safe_increment(state.count)
        schedule = optax.ScaleByScheduleState(optax.safe_increment(state.schedule.count))
        state = state._replace(count=count, schedule=schedule)
        learns = _learns(p, count)
        if k.replicas is None:
            mu, nu = first_moments(updates, state.mu, step.betas[0]), second_moments(updates, state.nu, step.betas[1])
            nu = jax.tree.map(lambda new, old: jnp.where(learns, new, old), nu, state.nu)
            return step.steps(mu, nu, params), state._replace(mu=mu, nu=nu)
        frozen = count > p["var_freeze_step"]
        kind = jnp.where(frozen, jnp.where(_averages(p, count), 3, 2), jnp.where(learns, 0, 1))
        # The count is the same on all devices, so they take the same branch, and its collectives meet.
        kinds = _exactly, _by_signs, partial(_alone, False), partial(_alone, True)
        return lax.switch(kind, [partial(f, step, k.replicas) for f in kinds], updates, state, params)

    return Transform(init, update)


def _learns(p: dict[str, Any], count: jax.Array) -> jax.Array:
    """Return whether a step moves the variance."""
    ends = jnp.array(_interval_ends(p["var_update_scaler"]), jnp.int32)
    interval = jnp.int32(1) << (count > ends).sum()
    return (count % interval == 0) & (count <= p["var_freeze_step"])


def _interval_ends(updates: int) -> list[int]:
    """Return the steps after which the interval of the variance doubles: each interval has that many updates.

    >>> _interval_ends(3)[:3]  # updates at 1, 2, 3; 4, 6, 8; 12, 16, 20
    [3, 8, 20]
    """
    ends, end, interval = [], 0, 1
    while (end := interval * (end // interval + updates)) < 2**31 - 1 and interval < 2**30:
        ends.append(end)
        interval *= 2
    return ends


def _averages(p: dict[str, Any], count: jax.Array) -> jax.Array:
    """Return whether the devices average after a step with the frozen variance; the others are local."""
    doubled = jnp.minimum((count - p["var_freeze_step"] - 1) // p["local_step_scaler"], 30)
    return count % jnp.minimum(jnp.int32(1) << doubled, p["local_step_clipper"]) == 0


class _Step(NamedTuple):
    """What the kinds of steps share: the numbers of one step."""

    k: Knobs
    p: dict[str, Any]
    betas: Any
    lr: Any

    def size(self, nu: PyTree) -> PyTree:
        return jax.tree.map(lambda v: jnp.sqrt(v) + self.p["eps"], nu)

    def rates(self, rate: Any, like: PyTree) -> PyTree:
        """Return the rate of every leaf: of its group."""
        return jax.tree.map(lambda scale: scale * rate, self.k.per_leaf("lr_scale", 1.0, like))

    def steps(self, mu: PyTree, nu: PyTree, params: PyTree) -> PyTree:
        """Return what Adam adds to the parameters."""
        decay = self.k.per_leaf("weight_decay", self.p["weight_decay"], mu)
        ratio = jax.tree.map(jnp.divide, where_learned(nu, mu), self.size(nu))
        step = lambda u, w, d, rate: -rate * (u + d * w)  # noqa: E731
        return jax.tree.map(step, ratio, params, decay, self.rates(self.lr, mu))


Stepped = tuple[Any, ZeroOneAdamState]


def _exactly(step: _Step, replicas: Replicas, updates: Any, state: ZeroOneAdamState, params: Any) -> Stepped:
    """Move both moments by the gradient."""
    grads, norm = replicas.all_reduce(updates)
    mu, nu = first_moments(grads, state.mu, step.betas[0]), second_moments(grads, state.nu, step.betas[1])
    return step.steps(mu, nu, params), state._replace(mu=mu, nu=nu, own_norm=norm)


def _by_signs(step: _Step, replicas: Replicas, updates: Any, state: ZeroOneAdamState, params: Any) -> Stepped:
    """Move the first moment by the average of the gradients' signs."""

    def of_device(own: Any, _: Any) -> Any:
        updates, worker, server = own
        grads, norm = replicas.of_device(updates)
        grads, worker, server = average_leaves(step.k, replicas, grads, worker, server)
        return (worker, server, norm), grads

    own = updates, state.worker_error, state.server_error
    (worker, server, norm), grads = replicas.on_each(of_device, own, ())
    mu = first_moments(where_learned(state.nu, grads), state.mu, step.betas[0])
    state = state._replace(mu=mu, worker_error=worker, server_error=server, own_norm=norm)
    return step.steps(mu, state.nu, params), state


def _alone(
    averages: bool, step: _Step, replicas: Replicas, updates: Any, state: ZeroOneAdamState, params: Any
) -> Stepped:
    """Take a step on every device; then perhaps average all since the last average."""

    def of_device(own: Any, shared: Any) -> Any:
        (updates, own_mu, taken, rates, *errors), (mu, nu, params) = own, shared
        grads, norm = replicas.of_device(updates)
        mu = jax.tree.map(jnp.multiply, mu, step.betas[0])
        own_mu = first_moments(grads, own_mu, step.betas[0])
        here = jax.tree.map(jnp.add, params, taken)
        taken = jax.tree.map(jnp.add, taken, step.steps(jax.tree.map(jnp.add, mu, own_mu), nu, here))
        rates += step.lr
        if not averages:
            return (own_mu, taken, rates, *errors, norm), (optax.tree.zeros_like(mu), mu)
        size, zeros = step.size(nu), optax.tree.zeros_like(mu)
        average, *errors = average_leaves(
            step.k, replicas, jax.tree.map(jnp.multiply, where_learned(nu, taken), size), *errors
        )
        average = where_learned(nu, average)
        # Without a variance there is weight decay alone, which is the same on all devices: nothing to average.
        moved = jax.tree.map(lambda v, a, s, t: jnp.where(v > 0, a / s, t), nu, average, size, taken)
        total = step.rates(rates, mu)  # 0: no rate, so the steps do not show the momentum, and it stays
        shown = lambda a, t, m: jnp.where(t > 0, -a / jnp.where(t > 0, t, 1.0), m)  # noqa: E731
        mu, own_mu = jax.tree.map(shown, average, total, mu), jax.tree.map(shown, zeros, total, own_mu)
        return (own_mu, zeros, rates * 0, *errors, norm), (moved, mu)

    # The errors of the gradients' average are not those of the steps'.
    first = state.count == step.p["var_freeze_step"] + 1
    errors = jax.tree.map(lambda e: jnp.where(first, 0.0, e), (state.worker_error, state.server_error))
    own = updates, state.own_mu, state.own_steps, state.own_rates, *errors
    own, (moved, mu) = replicas.on_each(of_device, own, (state.mu, state.nu, params))
    return moved, ZeroOneAdamState(state.count, state.schedule, mu, state.nu, *own)
