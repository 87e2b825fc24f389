"""DeepSpeed's optimizers as optax transformations: its arithmetic, bounds and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jzero.optimizers.lr_schedules import Schedule
from jzero.optimizers.wrappers import Transform, labels, per_layer


@dataclass(frozen=True)
class Knobs:
    """What an optimizer is made with besides its parameters."""

    schedule: Schedule
    base_lr: float
    stacked: Any

    @property
    def lr(self) -> Callable[[Any], Any]:
        return self.schedule.lr

    def betas(self, p: Mapping[str, Any]) -> tuple[Any, float]:
        """(beta1, beta2): the parameters', or OneCycle's momentum and 0.99."""
        return tuple(p["betas"]) if self.schedule.momentum is None else (self.schedule.momentum, 0.99)

    def lr_from(self, start: float) -> Callable[[Any], Any]:
        """The schedule as if it had been built on `start`."""
        ratio = start / self.base_lr if self.base_lr else 1.0
        return lambda count: self.lr(count) * ratio


def _scale_by_adam(betas: tuple[Any, float], eps: float, bias_correction: bool = True) -> Transform:
    """Adam's direction; unlike optax's with an optional bias correction and a beta1 that may follow the count."""
    b1, b2 = betas

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=zeros(params), nu=zeros(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        beta = b1(state.count) if callable(b1) else b1
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: beta * m + (1 - beta) * g, updates, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, updates, state.nu)
        c1, c2 = (1 - beta**count, 1 - b2**count) if bias_correction else (1.0, 1.0)
        direction = jax.tree.map(lambda m, v: (m / c1) / (jnp.sqrt(v / c2) + eps), mu, nu)
        return direction, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return Transform(init, update)


def adam(k: Knobs, p: dict[str, Any]) -> Transform:
    """Decay decoupled (AdamW, arXiv:1711.05101), or as L2 on the gradient without adam_w_mode."""
    decay = optax.add_decayed_weights(p["weight_decay"])
    direction = _scale_by_adam(k.betas(p), p["eps"], p["bias_correction"])
    order = (direction, decay) if p["adam_w_mode"] else (decay, direction)
    return optax.chain(*order, optax.scale_by_learning_rate(k.lr))


def lamb(k: Knobs, p: dict[str, Any]) -> Transform:
    """arXiv:1904.00962 with DeepSpeed's bounds on the trust ratio."""

    def trust(u: jax.Array, w: jax.Array) -> jax.Array:
        u_norm, w_norm = (jnp.sqrt(jnp.sum(x * x)) for x in (u, w))
        some = (u_norm > 0) & (w_norm > 0)
        ratio = jnp.where(some, w_norm / jnp.where(some, u_norm, 1.0), 1.0)
        return u * jnp.clip(ratio, p["min_coeff"], p["max_coeff"])

    return optax.chain(
        _scale_by_adam(k.betas(p), p["eps"], p["bias_correction"]),
        optax.add_decayed_weights(p["weight_decay"]),
        per_layer(optax.stateless_with_tree_map(trust), k.stacked),
        optax.scale_by_learning_rate(k.lr),
    )


def lion(k: Knobs, p: dict[str, Any]) -> Transform:
    """arXiv:2302.06675."""
    b1, b2 = k.betas(p)
    scheduled = optax.inject_hyperparams(optax.scale_by_lion) if callable(b1) else optax.scale_by_lion
    decay = optax.add_decayed_weights(p["weight_decay"])
    return optax.chain(scheduled(b1=b1, b2=b2), decay, optax.scale_by_learning_rate(k.lr))


def sgd(k: Knobs, p: dict[str, Any]) -> Transform:
    decay = optax.add_decayed_weights(p["weight_decay"])
    momentum = optax.trace(p["momentum"], p["nesterov"]) if p["momentum"] else optax.identity()
    return optax.chain(decay, momentum, optax.scale_by_learning_rate(k.lr))


def adagrad(k: Knobs, p: dict[str, Any]) -> Transform:
    """torch.optim.Adagrad: unlike optax's, eps lies outside the root."""

    def init(params: Any) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(optax.tree.full_like(params, p["initial_accumulator_value"]))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByRssState]:
        total = jax.tree.map(lambda g, s: s + g * g, updates, state.sum_of_squares)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + p["eps"]), updates, total), optax.ScaleByRssState(total)

    decay = optax.add_decayed_weights(p["weight_decay"])
    return optax.chain(decay, Transform(init, update), optax.scale_by_learning_rate(k.lr))


def muon(k: Knobs, p: dict[str, Any]) -> Transform:
    """Muon on the hidden matrices, AdamW on the rest (kellerjordan.github.io/posts/muon).

    Hidden: at least 2-D per layer, and inside the layer stack, or, in a model without one, with no "embed" or
    "lm_head" in its name. Matrices are the last two axes; axes before them (layers, experts) are a batch.
    """

    def widen(u: jax.Array) -> jax.Array:
        return u * max(1.0, u.shape[-1] / u.shape[-2]) ** 0.5

    matrices = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    decay = optax.add_decayed_weights(p["weight_decay"])
    hidden = optax.chain(
        optax.contrib.scale_by_muon(
            beta=p["momentum"],
            weight_dimension_numbers=partial(jax.tree.map, lambda _: matrices),
        ),
        optax.stateless_with_tree_map(lambda u, _: widen(u)),
        decay,
        optax.scale_by_learning_rate(k.lr_from(first(p["muon_lr"], p["lr"], 0.02))),
    )
    rest = optax.chain(
        _scale_by_adam(k.betas(p), p["eps"]),
        decay,
        optax.scale_by_learning_rate(k.lr_from(first(p["adam_lr"], p["lr"], 3e-4))),
    )
    return optax.partition({"muon": hidden, "adam": rest}, partial(_muon_labels, k.stacked))


def first(*values: float | None) -> float:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _muon_labels(stacked: Any, params: Any) -> Any:
    if stacked is not None and any(jax.tree.leaves(stacked)):
        return labels(stacked, lambda s, p: "muon" if s and p.ndim >= 3 else "adam", params)

    def label(path: tuple, p: Any) -> str:
        name = jax.tree_util.keystr(path).lower()
        return "muon" if p.ndim >= 2 and "embed" not in name and "lm_head" not in name else "adam"

    return jax.tree_util.tree_map_with_path(label, params)
