"""Optimizers: DeepSpeed's by its names, parameters and defaults; optax's by theirs, except `table.REFUSED`.

Read `table` (a name is a row), `transforms` and `muon` (the arithmetic), `moments` (its dtype), `groups`,
`lr_schedules`.

An optimizer that looks at a whole parameter (Lamb's trust ratio, Muon's orthogonalisation, Adafactor's factored
moments) sees each layer of a layer stack as a parameter of its own. The state keeps the parameters' key paths: a state
leaf that belongs to a parameter has a path that ends with the parameter's, and for elementwise state its shape.
Sharding specs are assigned by that rule.

The arithmetic and the state are fp32 whatever the parameters' dtype, unless `state_dtype` changes the state's; Muon
iterates in bfloat16 under a compute dtype of 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from jzero.errors import ConfigError, one_line, shorten
from jzero.optimizers.groups import WHY, Group, group_problems, make_groups, own_values
from jzero.optimizers.lr_schedules import LRSchedule
from jzero.optimizers.moments import state_format
from jzero.optimizers.muon import fused_matrices
from jzero.optimizers.table import OptimizerSection, Row, base_rate, look_up
from jzero.optimizers.transforms import Knobs, Placement, Transform, in_fp32, per_layer, scale_updates
from jzero.tree import PyTree
from jzero.values.parameters import Values

__all__ = [
    "Group", "Placement", "at_step", "base_lr", "callers_optimizer", "describe",
    "fused_matrices", "lr_of", "make_groups", "make_optimizer", "optimizer_problems",
    "parameters", "per_layer", "why_not_scaled",
]  # fmt: skip


def make_optimizer(
    optimizer_config: OptimizerSection | None,
    lr: LRSchedule | None,
    *,
    stacked: PyTree,
    fused: Mapping[str, tuple] = MappingProxyType({}),
    groups: Sequence[Group] = (),
    state_dtype: DTypeLike = jnp.float32,
    placement: Placement | None = None,
    compute_dtype: DTypeLike = jnp.float32,
) -> Transform:
    """Make the optimizer of a config's `optimizer` section.

    Args:
      optimizer_config: has `type` (in any letter case) and `params`; a value "auto" counts as not given.
      lr: the schedule, built on `base_lr(optimizer_config)`, so there is one if there is a section.
      stacked: a tree of bool over the parameters (or a prefix of it), True where the leading axis is the layer axis;
        None for a model without a layer stack.
      fused: the cuts of the parameters that contain several matrices, see `fused_matrices`.
      groups: parameters with values of their own, see `make_groups`.
      state_dtype: dtype of the moments; the arithmetic is fp32 in any case. With a key `rounding` an update rounds
        them to bfloat16 or fp8 up or down at random.
      placement: where the parameters are, for optimizers that move whole matrices; None: all are on each device.
      compute_dtype: of the model; with one of 16 bits Muon iterates in bfloat16.

    Returns:
      A transformation whose `update` needs the parameters. Apply its updates with `optax.apply_updates`.

    Raises:
      ConfigError: no section; an unknown or refused type; unknown, missing or bad parameters (all at once); betas of a
        group under OneCycle's momentum.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(type="AdamW", params={"lr": 0.1, "betas": [0.9, 0.95]})
    >>> tx = make_optimizer(config, LRSchedule(lambda count: 0.1), stacked=None)
    >>> params = {"w": jnp.ones(2)}
    >>> updates, state = tx.update({"w": jnp.array([1.0, -2.0])}, tx.init(params), params)
    >>> [round(u, 4) for u in updates["w"].tolist()]
    [-0.1, 0.1]
    """
    if optimizer_config is None:
        raise ConfigError(
            'optimizer: none given; put one in the config ("optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}) '
            "or pass optimizer=optax.adamw(1e-3)"
        )
    assert lr is not None  # noqa: S101  # made from the optimizer section's params.lr if there is no scheduler section
    row, params = _read(optimizer_config)
    own = own_values(groups)
    if lr.momentum is not None and any("betas" in values for values in own.values()):
        raise ConfigError(
            "optimizer.groups: betas have no effect under OneCycle's cycle_momentum, which sets them for all "
            "parameters; remove them, or set scheduler.params.cycle_momentum to false"
        )
    tx = row.make(Knobs(lr, base_rate(params), stacked, fused, own, placement, compute_dtype), params)
    scales = {name: values["lr_scale"] for name, values in own.items() if "lr_scale" in values}
    return scale_updates(in_fp32(tx, state_format(state_dtype, stacked)), scales)


def callers_optimizer(optimizer: object, lr: LRSchedule | None) -> Transform:
    """Return the optimizer that user code passed in.

    Args:
      optimizer: an `optax.GradientTransformation`, or a function from the schedule (count -> learning rate) to one. It
        is used unchanged: with its own learning rate, and with each parameter of a layer stack as one array
        [layers, ...]. Where that changes its updates the step warns (`stack_probe`): wrap it by `per_layer`.
      lr: the schedule.

    Raises:
      ConfigError: an object of another type, or a function without a schedule.
    """
    before, after = "", ""
    if callable(optimizer):
        if lr is None:
            raise ConfigError(
                "optimizer: a function from a schedule needs one; give a scheduler section, or the optimizer section's "
                "params.lr for a constant rate"
            )
        optimizer, before, after = optimizer(lr.lr), "the function returned ", ", which"
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    fix = 'leave it out and write "optimizer" in the config, or pass optax.adamw()'
    if isinstance(optimizer, optax.MultiSteps):
        fix = 'jzero accumulates: set "gradient_accumulation_steps" in the config, and pass the optimizer inside'
    raise ConfigError(
        f"optimizer: {before}{shorten(one_line(repr(optimizer)), 80)}{after} is neither an "
        f"optax.GradientTransformation nor a function from a schedule to one; {fix}"
    )


def optimizer_problems(optimizer_config: OptimizerSection) -> list[str]:
    """List the problems of a config's `optimizer` section that show before any array is made."""
    row, params, problems = look_up(optimizer_config)
    return [*problems, *group_problems(optimizer_config, row, params)]


def parameters(optimizer_config: OptimizerSection) -> Values:
    """Return the parameters of a config's `optimizer` section that have an effect, with the defaults filled in."""
    row, params = _read(optimizer_config)
    return {name: value for name, value in params.items() if name not in row.idle}


def _read(optimizer_config: OptimizerSection) -> tuple[Row, Values]:
    """Return the row of a config's optimizer and its parameters; raise a ConfigError that lists every problem."""
    row, params, wrong = look_up(optimizer_config)
    if row is None or wrong:
        raise ConfigError(*wrong)
    return row, params


def base_lr(optimizer_config: OptimizerSection | None) -> float | None:
    """Return the learning rate that schedules start from: the optimizer's `lr`, or the type's default.

    Args:
      optimizer_config: the section, or None.

    Returns:
      The rate; None without a section.

    Raises:
      ConfigError: as `make_optimizer`.

    >>> from types import SimpleNamespace
    >>> base_lr(SimpleNamespace(type="AdamW", params={}))
    0.001
    """
    if optimizer_config is None:
        return None
    _, params = _read(optimizer_config)
    return base_rate(params)


def why_not_scaled(optimizer_config: Any) -> str:
    """Explain why the config's optimizer cannot run at another rate by scaling its updates; "" if it can."""
    row, _ = _read(optimizer_config)
    return "" if "lr_scale" in row.by_group else f"{optimizer_config.type} {WHY['lr_scale']}"


def describe(optimizer_config: OptimizerSection, lr: LRSchedule | None) -> tuple[str, ...]:
    """List the run report's notes on the config's optimizer: where it differs from what its name suggests.

    Args:
      optimizer_config, lr: as for `make_optimizer`.
    """
    row, params = _read(optimizer_config)
    name, given = optimizer_config.type, optimizer_config.params or {}
    texts = [note for when, note in row.notes if when(params)]
    notes = [text.format(name=name, **params) for text in texts]
    notes += [f"{name}: {key} has no effect: {why}" for key, why in row.idle.items() if key in given]
    if lr is not None and lr.momentum is not None:
        if "betas" in row.params:
            notes.append(f"{name}: OneCycle's cycle_momentum sets beta1; beta2 is 0.99, as in DeepSpeed")
        else:
            notes.append(f"{name}: OneCycle's cycle_momentum is not used, the optimizer has no betas")
    return tuple(notes)


def at_step(opt_state: PyTree, count: ArrayLike) -> PyTree:
    """Move the schedules in an optimizer's state to a step; the moments keep their own counts.

    A state whose only field is `count` is a schedule's. Some optimizers look up the rate by the count that also
    corrects their moments (optax's madgrad, prodigy and dadapt_adamw; Adam's first beta under OneCycle's
    cycle_momentum): they keep theirs.

    Args:
      opt_state: an optax state.
      count: optimizer steps applied so far.

    Returns:
      The state with those counts replaced.

    >>> state = at_step(optax.adam(lambda count: 0.1).init({"w": jnp.ones(2)}), 7)
    >>> int(state[0].count), int(state[1].count)
    (0, 7)
    """

    def is_schedule(node: PyTree) -> bool:
        return getattr(node, "_fields", ()) == ("count",)

    def moved(node: PyTree) -> PyTree:
        return node._replace(count=jnp.full_like(node.count, count)) if is_schedule(node) else node

    return jax.tree.map(moved, opt_state, is_leaf=is_schedule)


def lr_of(opt_state: PyTree) -> jax.Array:
    """Read the learning rate from the state of an `optax.inject_hyperparams` optimizer; nan for any other.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    >>> float(lr_of(tx.init({"w": jnp.ones(2)}))), float(lr_of(optax.sgd(0.25).init({"w": jnp.ones(2)})))
    (0.25, nan)
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "hyperparams"))
    rates = [x.hyperparams["learning_rate"] for x in nodes if "learning_rate" in getattr(x, "hyperparams", {})]
    return jnp.asarray(rates[0] if rates else jnp.nan, jnp.float32)
