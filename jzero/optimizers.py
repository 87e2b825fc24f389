"""Optimizers: DeepSpeed's by its names, parameters and defaults; any optax alias by its own.

An optimizer that looks at a whole parameter (Lamb's trust ratio, Muon's orthogonalisation, Adafactor's factored
moments) sees each layer of a layer stack as a parameter of its own: `per_layer` maps it over the leading axis. The
state keeps the parameters' key paths: a state leaf that belongs to a parameter has a path that ends with the
parameter's, and for elementwise state its shape, so sharding specs can be assigned by that rule.

The arithmetic and the state are fp32 whatever the parameters' dtype, unless `state_dtype` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jzero.errors import ConfigError
from jzero.lr_schedules import (
    Param,
    Schedule,
    boolean,
    did_you_mean,
    drop_auto,
    fraction,
    from_config,
    is_number,
    non_negative,
    one_of,
    param_problems,
    signature_params,
)

Transform: TypeAlias = optax.GradientTransformation


def build(optimizer_config: Any, lr: Schedule, *, stacked: Any, state_dtype: Any = jnp.float32) -> Transform:
    """The optimizer of a config's `optimizer` section.

    Args:
      optimizer_config: has `type` (any case of letters) and `params`; a value "auto" counts as not given.
      lr: the schedule, built on `base_lr(optimizer_config)`.
      stacked: a tree of bool over the parameters (or a prefix of it), True where the leading axis is the layer axis;
        None for a model without a layer stack.
      state_dtype: of the moments; the arithmetic is fp32 in any case.

    Returns:
      A transformation whose `update` needs the parameters. Apply its updates with `optax.apply_updates`.

    Raises:
      ConfigError: an unknown or refused type; unknown, missing or bad parameters (all at once).

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(type="AdamW", params={"lr": 0.1, "betas": [0.9, 0.95]})
    >>> tx = build(config, Schedule(lambda count: 0.1), stacked=None)
    >>> params = {"w": jnp.ones(2)}
    >>> updates, state = tx.update({"w": jnp.array([1.0, -2.0])}, tx.init(params), params)
    >>> [round(u, 4) for u in updates["w"].tolist()]
    [-0.1, 0.1]
    """
    row, params = _read(optimizer_config)
    return _in_fp32(row.make(_Knobs(lr, float(row.base(params)), stacked), params), state_dtype)


def resolve(
    optimizer: Any, optimizer_config: Any, lr: Schedule | None, *, stacked: Any, state_dtype: Any = jnp.float32
) -> Transform:
    """The client's optimizer if there is one, else the config's.

    Args:
      optimizer: None, an `optax.GradientTransformation` (taken as it is: its own learning rate, its own view of layer
        stacks, see `per_layer`), or a function from the schedule (count -> learning rate) to one.
      optimizer_config, lr, stacked, state_dtype: as for `build`.

    Raises:
      ConfigError: no optimizer at all, or something else than the above.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    if callable(optimizer):
        if lr is None:
            raise ConfigError(
                "optimizer: a function from a schedule needs one; give a scheduler section, or the optimizer section's "
                "params.lr for a constant rate"
            )
        made = optimizer(lr.lr)
        if isinstance(made, optax.GradientTransformation):
            return made
        raise ConfigError(f"optimizer: the function returned {made!r}, not an optax.GradientTransformation")
    if optimizer is not None:
        raise ConfigError(
            f"optimizer: {optimizer!r} is neither an optax.GradientTransformation nor a function from a schedule to one"
        )
    if optimizer_config is None:
        raise ConfigError(
            'optimizer: none given; put one in the config ("optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}) '
            "or pass optimizer=optax.adamw(1e-3)"
        )
    lr = from_config(None, base_lr(optimizer_config)) if lr is None else lr
    assert lr is not None
    return build(optimizer_config, lr, stacked=stacked, state_dtype=state_dtype)


def base_lr(optimizer_config: Any) -> float | None:
    """The optimizer's own learning rate, the one that schedules start from: its `lr`, or the type's default.

    None without an `optimizer` section.

    >>> from types import SimpleNamespace
    >>> base_lr(SimpleNamespace(type="AdamW", params={}))
    0.001
    """
    if optimizer_config is None:
        return None
    row, params = _read(optimizer_config)
    return float(row.base(params))


def describe(optimizer_config: Any, lr: Schedule | None) -> tuple[str, ...]:
    """What the run report says about the config's optimizer: where it is not what its name suggests."""
    row, params = _read(optimizer_config)
    name = optimizer_config.type
    notes = [note.format(name=name, **params) for when, note in row.notes if when(params)]
    if lr is not None and lr.momentum is not None:
        if row.cycles:
            notes.append(f"{name}: OneCycle's cycle_momentum sets beta1; beta2 is 0.99, as in DeepSpeed")
        else:
            notes.append(f"{name}: OneCycle's cycle_momentum is not used, the optimizer has no betas")
    return tuple(notes)


def lr_of(opt_state: Any) -> jax.Array:
    """The learning rate of a client's optimizer built with `optax.inject_hyperparams`; nan for any other.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    >>> float(lr_of(tx.init({"w": jnp.ones(2)}))), float(lr_of(optax.sgd(0.25).init({"w": jnp.ones(2)})))
    (0.25, nan)
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "hyperparams"))
    rates = [x.hyperparams["learning_rate"] for x in nodes if "learning_rate" in getattr(x, "hyperparams", {})]
    return jnp.asarray(rates[0] if rates else jnp.nan, jnp.float32)


# ------------------------------------------------------------------------------------------ layers and dtypes


def per_layer(tx: Transform, stacked: Any) -> Transform:
    """`tx` that treats each layer of a stacked leaf as its own parameter: it is mapped over the leading axis.

    For transformations that look at one whole leaf at a time. Stacks must all have the same number of layers.

    Args:
      tx: any transformation.
      stacked: a tree of bool over the parameters (or a prefix of it), or None: `tx` as it is.

    >>> clip = per_layer(optax.clip_by_block_rms(1.0), {"stack": True, "end": False})
    >>> x = {"stack": jnp.array([[4.0, 4.0], [0.5, 0.5]]), "end": jnp.array([2.0, 2.0])}
    >>> clip.update(x, clip.init(x), x)[0]["stack"].tolist()
    [[1.0, 1.0], [0.5, 0.5]]
    """
    if stacked is None or not any(jax.tree.leaves(stacked)):
        return tx
    tx = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return jax.vmap(partial(tx.update, **extra))(updates, state, params)

    layered = optax.GradientTransformationExtraArgs(jax.vmap(tx.init), update)
    return optax.partition({"layers": layered, "rest": tx}, partial(_labels, stacked, lambda s, p: _WHICH[s]))


_WHICH = {True: "layers", False: "rest"}


def _labels(stacked: Any, label: Callable[[bool, Any], str], params: Any) -> Any:
    """label(is stacked, leaf) for each parameter; `stacked` may be a prefix, or None for nothing stacked."""
    stacked = False if stacked is None else stacked
    return jax.tree.map(lambda s, part: jax.tree.map(lambda p: label(bool(s), p), part), stacked, params)


def _in_fp32(tx: Transform, state_dtype: Any) -> Transform:
    """`tx` computing in fp32 for parameters of any dtype, its per-parameter state kept in `state_dtype`."""
    tx = optax.with_extra_args_support(tx)
    low = jnp.dtype(state_dtype) != jnp.float32

    def up(tree: Any) -> Any:
        return jax.tree.map(lambda x: _as_floating(x, jnp.promote_types(x.dtype, jnp.float32)), tree)

    def store(state: Any, params: Any) -> Any:
        return _map_owned(lambda x: _as_floating(x, state_dtype), state, params) if low else state

    def init(params: Any) -> Any:
        return store(tx.init(up(params)), params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        loaded = _map_owned(lambda x: _as_floating(x, jnp.float32), state, updates) if low else state
        new_updates, new_state = tx.update(up(updates), loaded, None if params is None else up(params), **extra)
        return new_updates, store(new_state, updates)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_floating(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _map_owned(function: Callable[[Any], Any], state: Any, params: Any) -> Any:
    """`function` on the state leaves that belong to a parameter: whose key path ends with the parameter's."""
    owners = {path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    lengths = {len(path) for path in owners}

    def leaf(path: tuple, x: Any) -> Any:
        return function(x) if any(path[len(path) - n :] in owners for n in lengths if n <= len(path)) else x

    return jax.tree_util.tree_map_with_path(leaf, state)


# ------------------------------------------------------------------------------------------ DeepSpeed's optimizers


@dataclass(frozen=True)
class _Knobs:
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


def _adam(k: _Knobs, p: dict[str, Any]) -> Transform:
    """Decay decoupled (AdamW, arXiv:1711.05101), or as L2 on the gradient without adam_w_mode."""
    decay = optax.add_decayed_weights(p["weight_decay"])
    adam = _scale_by_adam(k.betas(p), p["eps"], p["bias_correction"])
    order = (adam, decay) if p["adam_w_mode"] else (decay, adam)
    return optax.chain(*order, optax.scale_by_learning_rate(k.lr))


def _lamb(k: _Knobs, p: dict[str, Any]) -> Transform:
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


def _lion(k: _Knobs, p: dict[str, Any]) -> Transform:
    """arXiv:2302.06675."""
    b1, b2 = k.betas(p)
    scheduled = optax.inject_hyperparams(optax.scale_by_lion) if callable(b1) else optax.scale_by_lion
    decay = optax.add_decayed_weights(p["weight_decay"])
    return optax.chain(scheduled(b1=b1, b2=b2), decay, optax.scale_by_learning_rate(k.lr))


def _sgd(k: _Knobs, p: dict[str, Any]) -> Transform:
    decay = optax.add_decayed_weights(p["weight_decay"])
    momentum = optax.trace(p["momentum"], p["nesterov"]) if p["momentum"] else optax.identity()
    return optax.chain(decay, momentum, optax.scale_by_learning_rate(k.lr))


def _adagrad(k: _Knobs, p: dict[str, Any]) -> Transform:
    """torch.optim.Adagrad: unlike optax's, eps lies outside the root."""

    def init(params: Any) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(optax.tree.full_like(params, p["initial_accumulator_value"]))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByRssState]:
        total = jax.tree.map(lambda g, s: s + g * g, updates, state.sum_of_squares)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + p["eps"]), updates, total), optax.ScaleByRssState(total)

    decay = optax.add_decayed_weights(p["weight_decay"])
    return optax.chain(decay, Transform(init, update), optax.scale_by_learning_rate(k.lr))


def _muon(k: _Knobs, p: dict[str, Any]) -> Transform:
    """Muon on the hidden matrices, AdamW on the rest (kellerjordan.github.io/posts/muon).

    Hidden: at least 2-D per layer, and inside the layer stack, or, in a model without one, with no "embed" or
    "lm_head" in its name. Matrices are the last two axes; axes before them (layers, experts) are a batch.
    """

    def widen(u: jax.Array) -> jax.Array:
        return u * max(1.0, u.shape[-1] / u.shape[-2]) ** 0.5

    matrices = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    decay = optax.add_decayed_weights(p["weight_decay"])
    muon = optax.chain(
        optax.contrib.scale_by_muon(
            beta=p["momentum"],
            weight_dimension_numbers=partial(jax.tree.map, lambda _: matrices),
        ),
        optax.stateless_with_tree_map(lambda u, _: widen(u)),
        decay,
        optax.scale_by_learning_rate(k.lr_from(_first(p["muon_lr"], p["lr"], 0.02))),
    )
    adam = optax.chain(
        _scale_by_adam(k.betas(p), p["eps"]),
        decay,
        optax.scale_by_learning_rate(k.lr_from(_first(p["adam_lr"], p["lr"], 3e-4))),
    )
    return optax.partition({"muon": muon, "adam": adam}, partial(_muon_labels, k.stacked))


def _first(*values: float | None) -> float:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _muon_labels(stacked: Any, params: Any) -> Any:
    if stacked is not None and any(jax.tree.leaves(stacked)):
        return _labels(stacked, lambda s, p: "muon" if s and p.ndim >= 3 else "adam", params)

    def label(path: tuple, p: Any) -> str:
        name = jax.tree_util.keystr(path).lower()
        return "muon" if p.ndim >= 2 and "embed" not in name and "lm_head" not in name else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


# ------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class _Row:
    """An optimizer: its parameters, how it is made, and what is worth saying about it, if a test on them holds.

    `cycles`: it has betas, so OneCycle's momentum applies.
    """

    params: dict[str, Param]
    make: Callable[[_Knobs, dict[str, Any]], Transform]
    notes: tuple[tuple[Callable[[dict[str, Any]], bool], str], ...] = ()
    cycles: bool = False
    base: Callable[[dict[str, Any]], float] = lambda p: p["lr"]


def _betas(default: tuple[float, float]) -> Param:
    def ok(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value)

    return Param(default, "two numbers in [0, 1)", ok)


def _only(value: Any, why: str) -> Param:
    return Param(value, f"{value!r}: {why}", lambda given: given == value)


_LR_DECAY = {"lr": non_negative(1e-3), "weight_decay": non_negative(0.0)}
_ADAM = {
    **_LR_DECAY,
    "betas": _betas((0.9, 0.999)),
    "eps": non_negative(1e-8),
    "bias_correction": boolean(True),
    "amsgrad": _only(False, 'with weight decay it is not supported; the type "amsgrad" is optax\'s, without'),
}
_TORCH_ADAM = {"torch_adam": boolean(False)}
_NO_TORCH = (lambda p: p["torch_adam"], "{name}: torch_adam chooses a kernel in DeepSpeed and has no meaning here")

_DEEPSPEED: dict[str, _Row] = {
    "Adam": _Row(
        {**_ADAM, **_TORCH_ADAM, "adam_w_mode": boolean(True)},
        _adam,
        (
            (
                lambda p: p["adam_w_mode"],
                "{name}: adam_w_mode is true, as in DeepSpeed: this is AdamW, with decoupled weight decay "
                "{weight_decay:g}; adam_w_mode false adds it to the gradient",
            ),
            _NO_TORCH,
        ),
        cycles=True,
    ),
    "AdamW": _Row(
        {**_ADAM, **_TORCH_ADAM, "adam_w_mode": _only(True, 'the type "Adam" can have it false')},
        _adam,
        (_NO_TORCH,),
        cycles=True,
    ),
    "SGD": _Row(
        {
            **_LR_DECAY,
            "momentum": fraction(0.0),
            "nesterov": boolean(False),
            "dampening": _only(0, "other values are not supported"),
        },
        _sgd,
    ),
    "Lamb": _Row(
        {
            **_ADAM,
            "eps_inside_sqrt": _only(False, "other values are not supported"),
            "min_coeff": non_negative(0.01),
            "max_coeff": non_negative(10.0),
        },
        _lamb,
        cycles=True,
    ),
    "Lion": _Row({**_LR_DECAY, "betas": _betas((0.9, 0.99))}, _lion, cycles=True),
    "Adagrad": _Row(
        {
            **_LR_DECAY,
            "lr": non_negative(1e-2),
            "eps": non_negative(1e-10),
            "initial_accumulator_value": non_negative(0.0),
        },
        _adagrad,
    ),
    "Muon": _Row(
        {
            "lr": non_negative(None),
            "muon_lr": non_negative(None),
            "adam_lr": non_negative(None),
            "momentum": fraction(0.95),
            "betas": _betas((0.9, 0.95)),
            "eps": non_negative(1e-10),
            "weight_decay": non_negative(0.0),
            "ns_method": one_of("gram", "gram", "standard"),
            "per_head_muon": _only(False, "per-head orthogonalisation is not supported yet"),
        },
        _muon,
        (
            (lambda p: p["ns_method"] == "gram", "{name}: ns_method gram runs the standard iteration, the same values"),
            (
                lambda p: True,
                "{name}: Muon on the matrices inside the layer stack (in a model without one: those not named embed or "
                "lm_head), AdamW on the rest; muon_lr and adam_lr keep their ratio to lr under a schedule",
            ),
        ),
        cycles=True,
        base=lambda p: _first(p["lr"], p["muon_lr"], 0.02),
    ),
}

_LATER = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD")

# optax aliases whose update of an element depends on nothing else, or on all parameters at once: stacking is harmless.
_PLAIN = (
    "acprop", "adabelief", "adadelta", "adamax", "adamaxw", "adan", "ademamix", "adopt", "amsgrad", "cocob",
    "dadapt_adamw", "dog", "dowg", "madgrad", "nadam", "nadamw", "noisy_sgd", "optimistic_adam_v2",
    "optimistic_gradient_descent", "prodigy", "radam", "rmsprop", "sign_sgd", "signum", "simplified_ademamix", "yogi",
)  # fmt: skip
# Those that look at one whole parameter at a time.
_WHOLE = ("adafactor", "fromage", "lars", "novograd", "sm3")
_REFUSED = {
    "lbfgs": "its line search evaluates the loss",
    "polyak_sgd": "its update needs the loss",
    "momo": "its update needs the loss",
    "momo_adam": "its update needs the loss",
    "sophia": "its update needs the loss function",
    "optimistic_adam": "it takes no schedule; optimistic_adam_v2 does",
    "rprop": "it has step sizes of its own and takes no schedule",
    "galore": "its projection is computed anew in every step when mapped over layers",
    "dpsgd": "it needs the gradient of every example",
    "schedule_free_adamw": "evaluation needs other parameters than training",
    "schedule_free_sgd": "evaluation needs other parameters than training",
}


def _alias(name: str) -> _Row:
    """The row of an optax alias: its own parameter names, the learning rate also as `lr`."""
    function = getattr(optax, name, None) or getattr(optax.contrib, name)
    not_from_json = ("mask", "weight_decay_mask", "trust_ratio_mask", "key", "clip_value_fn")
    params = signature_params(function)
    own_lr = params.pop("learning_rate").default
    params = {key: param for key, param in params.items() if key not in not_from_json}

    def make(k: _Knobs, p: dict[str, Any]) -> Transform:
        arguments = {key: value for key, value in p.items() if key != "lr"}
        try:
            if name == "sm3":  # takes a constant rate only
                tx = optax.chain(function(learning_rate=1.0, **arguments), optax.scale_by_schedule(k.lr))
            else:
                tx = function(learning_rate=k.lr, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer.params: {name} refuses {arguments!r}: {error}") from error
        return per_layer(tx, k.stacked) if name in _WHOLE else tx

    return _Row({"lr": non_negative(own_lr if is_number(own_lr) else 1e-3), **params}, make)


def _read(optimizer_config: Any) -> tuple[_Row, dict[str, Any]]:
    """The row of a config's optimizer and its parameters over the row's defaults, or every problem."""
    given_name = str(optimizer_config.type)
    name = given_name.lower()
    deepspeed = {n.lower(): row for n, row in _DEEPSPEED.items()}
    given = drop_auto(optimizer_config.params or {})
    if name in deepspeed:
        row = deepspeed[name]
    elif name in (*_PLAIN, *_WHOLE):
        row = _alias(name)
        if "learning_rate" in given:
            given.setdefault("lr", given.pop("learning_rate"))
    else:
        raise ConfigError(_no_such(given_name))
    problems = []
    if "max_grad_norm" in given:
        value = given.pop("max_grad_norm")
        problems.append(
            f"optimizer.params.max_grad_norm: {value!r} is not allowed here; use the top-level key: "
            f'"gradient_clipping": {value!r}'
        )
    problems += param_problems("optimizer.params", given, row.params)
    params = {key: given.get(key, param.default) for key, param in row.params.items()}
    if name == "sgd" and params["nesterov"] is True and not params["momentum"]:
        problems.append("optimizer.params.nesterov: true needs a momentum; give optimizer.params.momentum, e.g. 0.9")
    if problems:
        raise ConfigError(*problems)
    return row, params


def _no_such(name: str) -> str:
    names = [*_DEEPSPEED, *_PLAIN, *_WHOLE]
    if name.lower() in (later.lower() for later in _LATER):
        return f"optimizer.type: {name!r} is not supported yet; allowed: {', '.join(names)}"
    if name.lower() in _REFUSED:
        return f"optimizer.type: {name!r} is not supported: {_REFUSED[name.lower()]}. Allowed: {', '.join(names)}"
    return (
        f"optimizer.type: {name!r} is unknown{did_you_mean(name, names)} Allowed: {', '.join(names)}; any other optax "
        "optimizer can be passed as optimizer=..."
    )
