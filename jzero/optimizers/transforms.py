"""Optax transformations: DeepSpeed's optimizers with its arithmetic and bounds, and wrappers of any transformation.

Muon is in `muon`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jzero.optimizers.lr_schedules import Curve, LRSchedule
from jzero.tree import PyTree, cast, path_name
from jzero.values.parameters import Values

Transform: TypeAlias = optax.GradientTransformation
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


# ------------------------------------------------------------------ wrappers


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


class StateFormat(NamedTuple):
    """The form in which an optimizer keeps its state between steps; by default as it computes with it.

    Attributes:
      store: (state, params, key or None) -> what is kept.
      load: (what is kept, params) -> the state.
    """

    store: Callable[[PyTree, PyTree, jax.Array | None], PyTree] = lambda state, params, key: state
    load: Callable[[PyTree, PyTree], PyTree] = lambda stored, params: stored


def in_fp32(tx: Transform, form: StateFormat = StateFormat()) -> Transform:  # noqa: B008  # it is immutable
    """Run `tx` in fp32 for parameters of any dtype, with its state in this form; see `moments.state_format`.

    `update` takes a key `rounding` for forms that round at random.
    """
    tx = optax.with_extra_args_support(tx)

    def up(tree: PyTree) -> PyTree:
        # float64 parameters stay float64
        return jax.tree.map(lambda x: cast(x, jnp.promote_types(x.dtype, jnp.float32)), tree)

    def init(params: PyTree) -> PyTree:
        return form.store(tx.init(up(params)), params, None)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, rounding: jax.Array | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        owners = updates if params is None else params
        loaded = form.load(state, owners)
        new_updates, new_state = tx.update(up(updates), loaded, None if params is None else up(params), **extra)
        return new_updates, form.store(new_state, owners, rounding)

    return optax.GradientTransformationExtraArgs(init, update)


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
