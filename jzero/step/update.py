"""The update: clip the gradients, run the optimizer, skip the step if a gradient is not finite.

Outside the manual region arrays are global, so norms, trust ratios and factored moments are right in every layout; XLA
inserts the few small collectives that they need.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero import optimizers
from jzero.layout import offload
from jzero.layout.sharding import is_state, trainable
from jzero.loss import LOSS
from jzero.model import fold, replace_state
from jzero.passes.gradients import Aside, Result
from jzero.step.setup import Setup
from jzero.step.state import TrainState
from jzero.tree import PyTree, combine, partition

Metrics = dict[str, jax.Array]


class SkipWhen(NamedTuple):
    """The conditions, besides gradients that are not finite, under which a step changes nothing; None: does not matter.

    Attributes:
      frozen: bool [], whether an earlier step was not finite, so that nothing may change any more.
      above: float32 [2], the largest loss and gradient norm of a step that changes anything.
    """

    frozen: jax.Array | None = None
    above: Any = None


NEVER = SkipWhen()
ROUNDING = 2**31 - 2  # folded into a step's key to make that of stochastic rounding
SCOPE = "jzero_update"  # around the update's operations in the train step


def update(
    setup: Setup, state: TrainState, result: Result, rate: jax.Array | None = None, skip: SkipWhen = NEVER
) -> tuple[TrainState, Metrics, jax.Array | None]:
    """Apply one step's gradients to a state.

    Args:
      setup: the optimizer, the layouts and the clipping.
      state: the state before the step.
      result: the gradients and losses at the state's parameters.
      rate: instead of the schedule's learning rate, which is then constant; None: the schedule's.
      skip: what else decides whether anything changes.

    Returns:
      The new state; the old one, with `step` and `loss_scale` advanced, if a gradient was not finite. And metrics:
      loss, grad_norm (global, before clipping), lr, loss_scale, skipped, and the model's own. And whether the next step
      is frozen.
    """
    # The norm is that of the whole gradient: `squares` are summed over all devices.
    norm = jnp.sqrt(result.squares.sum())
    gradients = _clipped(setup, result.gradients, norm)

    # Leaves on the host stay there: the optimizer's kernels read and write them over PCIe.
    old, old_opt_state = partition(state.params, trainable(setup.layouts))[0], state.opt_state
    if _is_on_host(setup):
        old, old_opt_state = offload.on_device((old, old_opt_state))
    extra = {} if rate is None else {"lr_factor": rate / setup.optimizer.schedule.constant}
    if setup.precision.at_random and not setup.optimizer.callers:
        # By the run's key and the step, so that a resumed run rounds as it would have.
        extra["rounding"] = fold(fold(state.rng, state.step), ROUNDING)
    updates, opt_state = setup.optimizer.tx.update(gradients, old_opt_state, old, value=result.means[LOSS], **extra)

    # The squares are summed over every axis that divides a parameter, so an overflow on one pipeline stage reaches all.
    finite = jnp.isfinite(result.squares) | (not setup.precision.check_overflow)
    finite_names = finite  # a stacked leaf has one flag for each of its names in checkpoints
    if getattr(setup.model, "names", None) is not None:
        finite_names = finite[jnp.array([index for _, index in setup.gradient_names])]
    applied, frozen = _applies(setup, state, result, finite, norm, skip)
    after = optax.apply_updates(old, updates), opt_state, result.aside
    new = _selected(setup, state, applied, after, (old, old_opt_state, aside_of(setup, state)))
    metrics = result.means | {
        "grad_norm": norm,
        "lr": learning_rate(setup, state) if rate is None else rate,
        "loss_scale": state.loss_scale.scale,
    }
    # A step whose gradients overflowed lowers the scale; the schedule counts the applied steps alone.
    loss_scale = setup.precision.scaler.update(state.loss_scale, finite_names)
    if skip.frozen is not None or skip.above is not None:
        # The scaler counted the steps that are not finite; the schedule must not count the other skipped ones either.
        also = finite.all() & ~applied
        loss_scale = dataclasses.replace(loss_scale, skipped=loss_scale.skipped + also)
    # A skipped step has a number too, so that the next one draws other dropout.
    new = dataclasses.replace(new, step=state.step + 1, loss_scale=loss_scale)
    return new, metrics | {"skipped": ~applied}, frozen


def _clipped(setup: Setup, gradients: PyTree, norm: jax.Array) -> PyTree:
    """Scale gradients down to the config's largest norm."""
    if not (clip := setup.config.gradient_clipping):
        return gradients
    # Exactly 1 below the limit: clipping that does nothing changes no bit.
    factor = jnp.where(norm > clip, clip / norm, 1.0)
    return jax.tree.map(lambda g: g * factor, gradients)


def _selected(setup: Setup, state: TrainState, applied: jax.Array, new: PyTree, old: PyTree) -> TrainState:
    """Replace trained parameters, optimizer state and `Aside` by `new` ones where a step is applied, else by `old`."""
    # A select keeps the old values, bit for bit, where a product with 0 would keep a NaN. What is aside is selected
    # too: a forward pass that overflowed leaves NaN in BatchNorm's statistics.
    params, opt_state, aside = jax.tree.map(partial(jnp.where, applied), new, old)
    stored, others = partition(state.params, trainable(setup.layouts))
    if _is_on_host(setup):
        params, opt_state = offload.as_stored((params, opt_state), (stored, state.opt_state))
    return with_aside(dataclasses.replace(state, params=combine(params, others), opt_state=opt_state), aside)


def _is_on_host(setup: Setup) -> bool:
    return any(any(layout.on_host) for layout in jax.tree.leaves(setup.layouts))


def _applies(
    setup: Setup, state: TrainState, result: Result, finite: jax.Array, norm: jax.Array, skip: SkipWhen
) -> tuple[jax.Array, jax.Array | None]:
    """Return whether the step changes anything, and whether none may after it (None: nobody asked)."""
    applied, frozen = finite.all(), skip.frozen
    if frozen is not None:  # a lower loss scale cures neither of the two
        lasting = ~jnp.isfinite(result.squares).all() & setup.precision.scaler.at_minimum(state.loss_scale)
        frozen = frozen | lasting | ~jnp.isfinite(result.means[LOSS])
        applied &= ~frozen
    if skip.above is not None:
        # NaN compares as false, so such a step is skipped here too.
        applied &= (result.means[LOSS] <= skip.above[0]) & (norm <= skip.above[1])
    return applied, frozen


def aside_of(setup: Setup, state: TrainState) -> Aside:
    """Return what a state, or the specs of one, keeps aside."""
    return Aside(partition(state.params, is_state(setup.layouts))[0], state.fp8)


def with_aside(state: TrainState, aside: Aside) -> TrainState:
    """Replace what a state keeps aside."""
    return dataclasses.replace(state, params=replace_state(state.params, aside.model), fp8=aside.fp8)


def learning_rate(setup: Setup, state: TrainState) -> jax.Array:
    """Look up the learning rate of the next step; NaN if the caller's optimizer does not expose it."""
    if setup.optimizer.schedule is None:
        return optimizers.lr_of(state.opt_state)
    return jnp.float32(setup.optimizer.schedule.lr(state.step - state.loss_scale.skipped))


def why_no_rate(setup: Setup, lr: Any) -> str:
    """Explain why the steps cannot run at the learning rate `lr`; "" if they can."""
    if not isinstance(lr, int | float | np.number | jax.Array) or not 0 <= float(lr) < np.inf:
        return "must be a number, 0 or greater"
    if setup.optimizer.callers:
        return "the optimizer is your own and has its own rate; pass it a schedule: optimizer=lambda lr: ..."
    if setup.optimizer.schedule is None or setup.optimizer.schedule.constant is None:
        return "a scheduler sets the rate of every step; remove it, or pass initialize(lr_scheduler=your function)"
    if not setup.optimizer.schedule.constant:
        return "the config's rate is 0, which no factor changes; set optimizer.params.lr to another number"
    return optimizers.why_not_scaled(setup.config.optimizer)
