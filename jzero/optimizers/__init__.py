"""Optimizers: DeepSpeed's by its names, parameters and defaults; optax's by theirs, but for those in `table.REFUSED`.

`transforms` has the arithmetic, `wrappers` what goes around it: an optimizer that looks at a whole parameter (Lamb's
trust ratio, Muon's orthogonalisation, Adafactor's factored moments) sees each layer of a layer stack as a parameter of
its own. The state keeps the parameters' key paths: a state leaf that belongs to a parameter has a path that ends with
the parameter's, and for elementwise state its shape, so sharding specs can be assigned by that rule.

The arithmetic and the state are fp32 whatever the parameters' dtype, unless `state_dtype` says otherwise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.errors import ConfigError
from jzero.optimizers.lr_schedules import Schedule, from_config
from jzero.optimizers.table import _PLAIN, _WHOLE, Row, look_up
from jzero.optimizers.transforms import Knobs
from jzero.optimizers.wrappers import Transform, in_fp32, per_layer

__all__ = [
    "_PLAIN", "_WHOLE", "at_step", "base_lr", "build", "describe", "lr_of", "per_layer", "problems", "resolve",
]  # fmt: skip


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
    return in_fp32(row.make(Knobs(lr, float(row.base(params)), stacked), params), state_dtype)


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


def problems(optimizer_config: Any) -> list[str]:
    """What is wrong with a config's `optimizer` section, as far as it shows before any array is made."""
    return look_up(optimizer_config)[2]


def _read(optimizer_config: Any) -> tuple[Row, dict[str, Any]]:
    """The row of a config's optimizer and its parameters, or a ConfigError with every problem."""
    row, params, wrong = look_up(optimizer_config)
    if row is None or wrong:
        raise ConfigError(*wrong)
    return row, params


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


def at_step(opt_state: Any, count: Any) -> Any:
    """An optimizer's state whose schedules have come to this step. A state that is a count alone is a schedule's.

    Optimizers that look up the rate by their own count (optax's madgrad, prodigy and dadapt_adamw), and Adam's first
    beta under OneCycle's cycle_momentum, keep it: it corrects their moments too.

    >>> state = at_step(optax.adam(lambda count: 0.1).init({"w": jnp.ones(2)}), 7)
    >>> int(state[0].count), int(state[1].count)
    (0, 7)
    """

    def alone(node: Any) -> bool:
        return getattr(node, "_fields", ()) == ("count",)

    def moved(node: Any) -> Any:
        return node._replace(count=jnp.full_like(node.count, count)) if alone(node) else node

    return jax.tree.map(moved, opt_state, is_leaf=alone)


def lr_of(opt_state: Any) -> jax.Array:
    """The learning rate of a client's optimizer built with `optax.inject_hyperparams`; nan for any other.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    >>> float(lr_of(tx.init({"w": jnp.ones(2)}))), float(lr_of(optax.sgd(0.25).init({"w": jnp.ones(2)})))
    (0.25, nan)
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "hyperparams"))
    rates = [x.hyperparams["learning_rate"] for x in nodes if "learning_rate" in getattr(x, "hyperparams", {})]
    return jnp.asarray(rates[0] if rates else jnp.nan, jnp.float32)
