"""DeepSpeed's optimizers as optax transformations: its arithmetic, bounds and defaults. Muon is in `muon`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.optimizers.lr_schedules import LRSchedule
from jzero.optimizers.wrappers import Transform, map_layers


@dataclass(frozen=True)
class Knobs:
    """The inputs of an optimizer besides its parameters.

    Attributes:
      schedule: learning rate and perhaps momentum.
      base_lr: the rate that the schedule is built on.
      stacked, fused: as for `make_optimizer`.
    """

    schedule: LRSchedule
    base_lr: float
    stacked: Any
    fused: Mapping[str, Sequence[int]]

    @property
    def lr(self) -> Callable[[Any], Any]:
        return self.schedule.lr

    def betas(self, p: Mapping[str, Any]) -> tuple[Any, float]:
        """Return (beta1, beta2): the parameters', or OneCycle's momentum and 0.99."""
        return tuple(p["betas"]) if self.schedule.momentum is None else (self.schedule.momentum, 0.99)

    def lr_from(self, start: float) -> Callable[[Any], Any]:
        """Return the schedule, rescaled as if it had been built on `start`."""
        ratio = start / self.base_lr if self.base_lr else 1.0
        return lambda count: self.lr(count) * ratio


# (first moments, second moments, 1 - beta1^t, 1 - beta2^t, parameters) -> direction; all trees except the two scalars.
Direction = Callable[[Any, Any, Any, Any, Any], Any]


def _scale_by_moments(betas: tuple[Any, float], direction: Direction) -> Transform:
    """Track Adam's two moments and apply `direction` to them; unlike optax's, beta1 may follow the count."""
    b1, b2 = betas

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=zeros(params), nu=zeros(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        beta = b1(state.count) if callable(b1) else b1
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: beta * m + (1 - beta) * g, updates, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, updates, state.nu)
        made = direction(mu, nu, 1 - beta**count, 1 - b2**count, params)
        return made, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return Transform(init, update)


def scale_by_adam(betas: tuple[Any, float], eps: float, bias_correction: bool = True) -> Transform:
    """Scale by Adam's moments, with or without bias correction."""

    def direction(mu: Any, nu: Any, c1: Any, c2: Any, params: Any) -> Any:
        c1, c2 = (c1, c2) if bias_correction else (1.0, 1.0)
        return jax.tree.map(lambda m, v: (m / c1) / (jnp.sqrt(v / c2) + eps), mu, nu)

    return _scale_by_moments(betas, direction)


def adam(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Adam with decoupled decay (AdamW, arXiv:1711.05101); without adam_w_mode, with L2 decay in the gradient."""
    decay = optax.add_decayed_weights(p["weight_decay"])
    direction = scale_by_adam(k.betas(p), p["eps"], p["bias_correction"])
    order = (direction, decay) if p["adam_w_mode"] else (decay, direction)
    return optax.chain(*order, optax.scale_by_learning_rate(k.lr))


def lamb(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make LAMB (arXiv:1904.00962) as DeepSpeed's kernel computes it, csrc/lamb/fused_lamb_cuda_kernel.cu.

    The paper, and optax.lamb, correct the moments' bias before the trust ratio, which then cancels the correction.
    DeepSpeed takes the ratio of the uncorrected direction and multiplies the step, weight decay included, by the
    correction. With the default betas and a ratio within its bounds, a step is 0.32 of the paper's at first, 0.15 at
    the tenth, and close to it after a few thousand.
    """

    def trust(u: jax.Array, w: jax.Array) -> jax.Array:
        u_norm, w_norm = (jnp.sqrt(jnp.sum(x * x)) for x in (u, w))
        both = (u_norm > 0) & (w_norm > 0)
        ratio = jnp.clip(w_norm / jnp.where(both, u_norm, 1.0), p["min_coeff"], p["max_coeff"])
        return u * jnp.where(both, ratio, 1.0)

    def direction(mu: Any, nu: Any, c1: Any, c2: Any, params: Any) -> Any:
        correction = jnp.sqrt(c2) / c1 if p["bias_correction"] else 1.0
        decayed = lambda m, v, w: m / (jnp.sqrt(v) + p["eps"]) + p["weight_decay"] * w  # noqa: E731
        updates = map_layers(trust, k.stacked, jax.tree.map(decayed, mu, nu, params), params)
        return jax.tree.map(lambda u: correction * u, updates)

    return optax.chain(_scale_by_moments(k.betas(p), direction), optax.scale_by_learning_rate(k.lr))


def lion(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Lion, arXiv:2302.06675."""
    b1, b2 = k.betas(p)
    # scale_by_lion takes numbers only; a beta1 that moves is injected at every step
    scheduled = optax.inject_hyperparams(optax.scale_by_lion) if callable(b1) else optax.scale_by_lion
    decay = optax.add_decayed_weights(p["weight_decay"])
    return optax.chain(scheduled(b1=b1, b2=b2), decay, optax.scale_by_learning_rate(k.lr))


def sgd(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make torch.optim.SGD: the decay is added to the gradient, before the momentum."""
    decay = optax.add_decayed_weights(p["weight_decay"])
    momentum = optax.trace(p["momentum"], p["nesterov"]) if p["momentum"] else optax.identity()
    return optax.chain(decay, momentum, optax.scale_by_learning_rate(k.lr))


def adagrad(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make torch.optim.Adagrad: unlike optax's, eps is outside the root."""

    def init(params: Any) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(optax.tree.full_like(params, p["initial_accumulator_value"]))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByRssState]:
        total = jax.tree.map(lambda g, s: s + g * g, updates, state.sum_of_squares)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + p["eps"]), updates, total), optax.ScaleByRssState(total)

    decay = optax.add_decayed_weights(p["weight_decay"])
    return optax.chain(decay, Transform(init, update), optax.scale_by_learning_rate(k.lr))


def first(*values: float | None) -> float:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
