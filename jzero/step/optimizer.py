"""The optimizer of a train step: its transformation, learning-rate schedule and parameter groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jzero import optimizers
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.layout import sharding
from jzero.model import ModelFacts
from jzero.optimizers import lr_schedules, transforms
from jzero.precision import Precision
from jzero.tree import PyTree, partition
from jzero.values.kinds import INT32
from jzero.values.parameters import Total, is_auto


@dataclass(frozen=True)
class StepOptimizer:
    """The optimizer of a step.

    Attributes:
      tx: the transformation of gradients.
      schedule: the learning rate over the applied steps; None if the caller's optimizer does not expose it.
      groups: its parameter groups; the last one has the parameters that the config's groups leave over.
      callers: whether the caller passed it in.
    """

    tx: optax.GradientTransformationExtraArgs
    schedule: Any
    groups: tuple[optimizers.Group, ...]
    callers: bool


def resolve_optimizer(
    facts: ModelFacts, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision, optimizer: Any,
    schedule: lr_schedules.LRSchedule | None,
) -> StepOptimizer:  # fmt: skip
    """Make the config's optimizer for a model's layouts, or take the caller's `optimizer`."""
    leaves = jax.tree.leaves(layouts)
    dims = {leaf.name: len(leaf.shape) - leaf.stacked for leaf in leaves if leaf.trainable}
    frozen = [leaf.name for leaf in leaves if not leaf.trainable]
    groups = optimizers.make_groups(config.optimizer if optimizer is None else None, dims, frozen, facts.names)
    if optimizer is not None:
        tx = optimizers.callers_optimizer(optimizer, schedule)
    else:
        stacked, _ = partition(jax.tree.map(lambda layout: layout.stacked, layouts), sharding.trainable(layouts))
        tx = optimizers.make_optimizer(
            config.optimizer, schedule, stacked=stacked, fused=optimizers.fused_matrices(facts.model, layouts),
            groups=groups, state_dtype=precision.optimizer_state,
            placement=optimizers.Placement(mesh, {x.name: x.spec for x in leaves}),
            compute_dtype=precision.compute,
        )  # fmt: skip
    # The caller's may be any of optax's, also one that takes nothing but gradients.
    tx = optax.with_extra_args_support(tx)  # reduce_on_plateau takes the loss
    if config.ema:
        tx = transforms.with_ema(tx, config.ema.decay)
    return StepOptimizer(tx, schedule, groups, optimizer is not None)


def resolve_schedule(
    config: Config, optimizer: Any, lr_scheduler: Any, total: int | Total | None
) -> lr_schedules.LRSchedule | None:
    """Choose the learning-rate schedule: the caller's, the config's, or None if the caller's optimizer has its own."""
    own = isinstance(optimizer, optax.GradientTransformation)
    if own and (lr_scheduler is not None or config.scheduler is not None):
        raise ConfigError(
            "scheduler: the optimizer passed in has its own learning rate, so this schedule would do nothing; pass "
            "a function of the schedule instead (optimizer=lambda lr: optax.adamw(lr)), or drop the scheduler"
        )
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise ConfigError(f"lr_scheduler: {lr_scheduler!r} is not a function from a step count to a learning rate")
    callers = "the optimizer passed in" if own else "lr_scheduler" if lr_scheduler is not None else None
    total = _total(config, callers, total)
    if own:
        return None
    if lr_scheduler is not None:
        return lr_schedules.LRSchedule(lr_scheduler)
    return lr_schedules.from_config(config.scheduler, optimizers.base_lr(config.optimizer), total)


def _total(config: Config, callers: str | None, total: int | Total | None) -> Total | None:
    """Read `total_num_steps`; a number that the caller passed in must have an effect.

    Args:
      callers: what the caller passed in instead of the config's schedule.
    """
    if total is None or isinstance(total, Total):
        return total
    try:
        steps = INT32(total)
    except ValueError as wrong:
        raise ConfigError(f"total_num_steps = {total!r}: {wrong}") from None
    kind = config.scheduler.type if config.scheduler else None
    given = config.scheduler.params.get("total_num_steps") if config.scheduler and not callers else None
    if given is None:
        taker = callers or (f"scheduler.type {kind!r}" if kind else "a constant learning rate")
        raise ConfigError(f"total_num_steps = {steps} has no effect: {taker} takes none; leave it out")
    if not is_auto(given) and given != steps:
        raise ConfigError(
            f'total_num_steps = {steps}, and scheduler.params.total_num_steps = {given}: write "auto" in the config, '
            "or pass no other number"
        )
    return Total(steps, "passed in")
