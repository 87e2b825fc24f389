"""DeepSpeed's optimizers as optax transformations: its arithmetic, bounds and defaults. Muon is in `muon`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jzero.optimizers.lr_schedules import Curve, LRSchedule
from jzero.optimizers.wrappers import Transform, map_layers
from jzero.tree import PyTree, path_name
from jzero.values.parameters import Values

Axes = tuple[str, ...]


class Placement(NamedTuple):
    """The devices of the parameters, and so of the updates: the mesh, and a spec for each name."""

    mesh: Mesh
    specs: Mapping[str, PartitionSpec]

    def axes(self, name: str, ndim: int) -> tuple[Axes, ...]:
        """Return the axes that divide each dimension of a parameter."""
        found = [(part,) if isinstance(part, str) else tuple(part or ()) for part in self.specs[name]]
        return (*found, *[()] * (ndim - len(found)))


@dataclass(frozen=True)
class Knobs:
    """The inputs of an optimizer besides its parameters.

    Attributes:
      schedule: learning rate and perhaps momentum.
      base_lr: the rate that the schedule is built on.
      stacked, fused, own, placement, compute_dtype: as for `make_optimizer`.
    """

    schedule: LRSchedule
    base_lr: float
    stacked: PyTree
    fused: Mapping[str, tuple]
    own: Mapping[str, Mapping[str, Any]]
    placement: Placement | None = None
    compute_dtype: DTypeLike = jnp.float32

    @property
    def lr(self) -> Curve:
        return self.schedule.lr

    def per_leaf(self, name: str, default: Any, like: PyTree) -> PyTree:
        """Map every leaf to its own value of an optimizer's parameter, or to the default."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self.own.get(path_name(path), {}).get(name, default), like
        )

    def betas(self, p: Values, count: ArrayLike, like: PyTree) -> tuple[PyTree, PyTree]:
        """Return the trees of beta1 and beta2: the parameters' and groups', or OneCycle's momentum and 0.99."""
        if self.schedule.momentum is not None:
            moved = self.schedule.momentum(count)
            return jax.tree.map(lambda _: moved, like), jax.tree.map(lambda _: 0.99, like)
        pairs = self.per_leaf("betas", tuple(p["betas"]), like)
        return jax.tree.map(lambda _, pair: pair[0], like, pairs), jax.tree.map(lambda _, pair: pair[1], like, pairs)

    def lr_from(self, start: float) -> Curve:
        """Return the schedule, rescaled as if it had been built on `start`."""
        ratio = start / self.base_lr if self.base_lr else 1.0
        return lambda count: self.lr(count) * ratio


def add_decay(k: Knobs, p: Values) -> Transform:
    """Add to every update its parameter times its weight decay."""

    def update(updates: PyTree, params: PyTree) -> PyTree:
        decay = k.per_leaf("weight_decay", p["weight_decay"], updates)
        return jax.tree.map(lambda u, w, d: u + d * w if d else u, updates, params, decay)

    return optax.stateless(update)


# (first moments, second moments, 1 - beta1^t, 1 - beta2^t, parameters) -> direction; all of them trees.
Direction = Callable[[PyTree, PyTree, PyTree, PyTree, PyTree], PyTree]


def _scale_by_moments(k: Knobs, p: Values, direction: Direction) -> Transform:
    """Track Adam's two moments and apply `direction` to them; unlike optax's, the betas may differ by parameter."""

    def init(params: PyTree) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like
        return optax.ScaleByAdamState(count=jnp.zeros([], jnp.int32), mu=zeros(params), nu=zeros(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, optax.ScaleByAdamState]:
        b1, b2 = k.betas(p, state.count, updates)
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m, b: b * m + (1 - b) * g, updates, state.mu, b1)
        nu = jax.tree.map(lambda g, v, b: b * v + (1 - b) * g * g, updates, state.nu, b2)
        c1, c2 = (jax.tree.map(lambda b: 1 - b**count, betas) for betas in (b1, b2))
        return direction(mu, nu, c1, c2, params), optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return Transform(init, update)


def adam(k: Knobs, p: Values, lr: Curve | None = None) -> Transform:
    """Make Adam with decoupled decay (AdamW, arXiv:1711.05101); without adam_w_mode, with L2 decay in the gradient.

    Args:
      lr: instead of the schedule.
    """

    def direction(mu: PyTree, nu: PyTree, c1: PyTree, c2: PyTree, params: PyTree) -> PyTree:
        if not p["bias_correction"]:
            return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + p["eps"]), mu, nu)
        return jax.tree.map(lambda m, v, c, d: (m / c) / (jnp.sqrt(v / d) + p["eps"]), mu, nu, c1, c2)

    order = _scale_by_moments(k, p, direction), add_decay(k, p)
    return optax.chain(*(order if p["adam_w_mode"] else order[::-1]), optax.scale_by_learning_rate(lr or k.lr))


def lamb(k: Knobs, p: Values) -> Transform:
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

    def direction(mu: PyTree, nu: PyTree, c1: PyTree, c2: PyTree, params: PyTree) -> PyTree:
        decay = k.per_leaf("weight_decay", p["weight_decay"], mu)
        decayed = lambda m, v, w, d: m / (jnp.sqrt(v) + p["eps"]) + d * w  # noqa: E731
        updates = map_layers(trust, k.stacked, jax.tree.map(decayed, mu, nu, params, decay), params)
        if not p["bias_correction"]:
            return updates
        return jax.tree.map(lambda u, c, d: jnp.sqrt(d) / c * u, updates, c1, c2)

    return optax.chain(_scale_by_moments(k, p, direction), optax.scale_by_learning_rate(k.lr))


def lion(k: Knobs, p: Values) -> Transform:
    """Make Lion, arXiv:2302.06675; unlike optax's, the betas may differ by parameter and follow the count."""

    def init(params: PyTree) -> optax.ScaleByLionState:
        return optax.ScaleByLionState(count=jnp.zeros([], jnp.int32), mu=optax.tree.zeros_like(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, optax.ScaleByLionState]:
        b1, b2 = k.betas(p, state.count, updates)
        blend = lambda g, m, b: (1 - b) * g + b * m  # noqa: E731
        direction = jax.tree.map(jnp.sign, jax.tree.map(blend, updates, state.mu, b1))
        mu = jax.tree.map(blend, updates, state.mu, b2)
        return direction, optax.ScaleByLionState(count=optax.safe_increment(state.count), mu=mu)

    return optax.chain(Transform(init, update), add_decay(k, p), optax.scale_by_learning_rate(k.lr))


def sgd(k: Knobs, p: Values) -> Transform:
    """Make torch.optim.SGD: the decay is added to the gradient, before the momentum."""
    momentum = optax.trace(p["momentum"], p["nesterov"]) if p["momentum"] else optax.identity()
    return optax.chain(add_decay(k, p), momentum, optax.scale_by_learning_rate(k.lr))


def adagrad(k: Knobs, p: Values) -> Transform:
    """Make torch.optim.Adagrad: unlike optax's, eps is outside the root."""

    def init(params: PyTree) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(optax.tree.full_like(params, p["initial_accumulator_value"]))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, optax.ScaleByRssState]:
        total = jax.tree.map(lambda g, s: s + g * g, updates, state.sum_of_squares)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + p["eps"]), updates, total), optax.ScaleByRssState(total)

    return optax.chain(add_decay(k, p), Transform(init, update), optax.scale_by_learning_rate(k.lr))


def first(*values: float | None) -> float:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
