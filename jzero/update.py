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
from jzero.fp8 import history
from jzero.gradients import Result
from jzero.loss import LOSS
from jzero.model import fold
from jzero.offload import transfers
from jzero.setup import Setup
from jzero.sharding import is_state, trainable
from jzero.state import TrainState
from jzero.tree import combine, partition

Metrics = dict[str, jax.Array]


class Conditions(NamedTuple):
    """What decides whether a step changes anything, beside finite gradients; None: does not matter.

    Attributes:
      halted: bool [], whether an earlier step was not finite, so that nothing may change any more.
      limits: float32 [2], the largest loss and the largest gradient norm of a step that may change anything.
    """

    halted: jax.Array | None = None
    limits: Any = None


ALWAYS = Conditions()
ROUNDING = 2**31 - 2  # folded into a step's key to make that of stochastic rounding
SCOPE = "jzero_update"  # around the update's operations in the train step


def update(
    setup: Setup, state: TrainState, result: Result, rate: jax.Array | None = None, only: Conditions = ALWAYS
) -> tuple[TrainState, Metrics, jax.Array | None]:
    """Apply one step's gradients to a state.

    Args:
      setup: the optimizer, the layouts and the clipping.
      state: the state before the step.
      result: the gradients and losses at the state's parameters.
      rate: instead of the schedule's learning rate, which is then constant; None: the schedule's.
      only: what else decides whether anything changes.

    Returns:
      The new state; the old one, with `step` and `loss_scale` advanced, if a gradient was not finite. And metrics:
      loss, grad_norm (global, before clipping), lr, loss_scale, skipped, and the model's own. And whether the next step
      is halted.
    """
    grads, squares = result.gradients, result.squares
    norm = jnp.sqrt(squares.sum())
    clip = setup.config.gradient_clipping
    if clip and not setup.averaging:
        factor = jnp.where(norm > clip, clip / norm, 1.0)
        grads = jax.tree.map(lambda g: g * factor, grads)
    stored, frozen = partition(state.params, trainable(setup.layouts))
    old, old_opt_state = transfers.on_device((stored, state.opt_state))
    extra = {} if rate is None else {"lr_factor": rate / setup.schedule.constant}
    if setup.precision.at_random and not setup.callers_optimizer:
        extra["rounding"] = fold(fold(state.rng, state.step), ROUNDING)
    updates, opt_state = setup.tx.update(grads, old_opt_state, old, value=result.means[LOSS], **extra)
    if setup.averaging:  # before it, the gradients are those of each device
        norm = optimizers.norm_of(opt_state)
    finite = jnp.isfinite(squares) | (not setup.precision.check_overflow)
    of_names = finite
    if getattr(setup.model, "names", None) is not None:  # a stacked leaf has a name for each layer
        of_names = finite[jnp.array([index for _, index in setup.gradient_names])]
    applied = finite.all()
    halted = only.halted
    if halted is not None:  # a lower loss scale cures neither of the two
        scaler = setup.precision.scaler
        lasting = ~jnp.isfinite(squares).all() & scaler.at_minimum(state.loss_scale)
        halted = halted | lasting | ~jnp.isfinite(result.means[LOSS])
        applied &= ~halted
    if only.limits is not None:
        applied &= (result.means[LOSS] <= only.limits[0]) & (norm <= only.limits[1])
    kept, frozen = partition(frozen, is_state(setup.layouts))
    params, opt_state, kept = jax.tree.map(
        partial(jnp.where, applied),
        (optax.apply_updates(old, updates), opt_state, result.state),
        (old, old_opt_state, kept),
    )
    params, opt_state = transfers.as_stored((params, opt_state), (stored, state.opt_state))
    own = {
        "grad_norm": norm,
        "lr": learning_rate(setup, state) if rate is None else rate,
        "loss_scale": state.loss_scale.scale,
    }
    metrics = result.means | own
    loss_scale = setup.precision.scaler.update(state.loss_scale, of_names)
    if only.halted is not None or only.limits is not None:  # the schedule counts the applied steps
        also = finite.all() & ~applied
        loss_scale = dataclasses.replace(loss_scale, skipped=loss_scale.skipped + also)
    state = dataclasses.replace(
        state,
        step=state.step + 1,
        params=combine(params, combine(kept, frozen)),
        opt_state=opt_state,
        loss_scale=loss_scale,
        fp8=history.advance(state.fp8, result.seen, applied),
    )
    metrics["skipped"] = ~applied
    return state, metrics, halted


def learning_rate(setup: Setup, state: TrainState) -> jax.Array:
    """Look up the learning rate of the next step; NaN if the caller's optimizer does not expose it."""
    if setup.schedule is None:
        return optimizers.lr_of(state.opt_state)
    return jnp.float32(setup.schedule.lr(state.step - state.loss_scale.skipped))


def why_no_rate(setup: Setup, lr: Any) -> str:
    """Explain why the steps cannot run at the learning rate `lr`; "" if they can."""
    if not isinstance(lr, int | float | np.number | jax.Array) or not 0 <= float(lr) < np.inf:
        return "must be a number, 0 or greater"
    if setup.callers_optimizer:
        return "the optimizer is your own and has its own rate; pass it a schedule: optimizer=lambda lr: ..."
    if setup.schedule is None or setup.schedule.constant is None:
        return "a scheduler sets the rate of every step; remove it, or pass initialize(lr_scheduler=your function)"
    if not setup.schedule.constant:
        return "the config's rate is 0, which no factor changes; set optimizer.params.lr to another number"
    return optimizers.why_not_scaled(setup.config.optimizer)
