"""The loss scaler, one for all devices: DeepSpeed's dynamic one with its hysteresis, as a pytree and pure functions.

The device decides whether a step is skipped; nothing waits for the host. The scale never falls below its minimum; after
`MAX_STUCK` skipped steps in a row there, `check_stuck` raises and names the parameters that failed first.
Source: deepspeed/runtime/fp16/loss_scaler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import escaped, some_of

MAX_STUCK = 20
"""Skipped steps in a row, at the minimum scale, before training stops: a batch or two may be bad, twenty are not.
From fp16's default start of 2**16 the scale reaches its minimum in fewer."""

_LARGEST = float(np.finfo(np.float32).max)


class NonFiniteError(FloatingPointError):
    """The gradients were not finite for `MAX_STUCK` steps in a row."""

    def __init__(self, text: str):
        super().__init__(escaped(text))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The state of the scaler: scalars, and one flag per gradient leaf.

    Attributes:
      scale: float32, the factor of the loss in this iteration.
      hysteresis: int32, overflows left to tolerate, plus one, before the scale halves.
      iteration: int32, steps so far, skipped ones included.
      last_overflow: int32, the iteration of the last overflow, -1 before any.
      stuck: int32, skipped steps in a row with the scale at its minimum (or not dynamic).
      skipped: int32, skipped steps so far.
      culprits: bool[n], the leaves that were not finite at the first step of the current run of skips.
    """

    scale: jax.Array
    hysteresis: jax.Array
    iteration: jax.Array
    last_overflow: jax.Array
    stuck: jax.Array
    skipped: jax.Array
    culprits: jax.Array


@dataclass(frozen=True)
class Scaler:
    """The settings of the scaler, and its two pure functions.

    >>> scaler = Scaler(dynamic=True, initial=2.0**16, window=2, hysteresis=1)
    >>> state = scaler.init(1)
    >>> scales = []
    >>> for finite in (True, True, True, False):
    ...     state = scaler.update(state, jnp.array([finite]))
    ...     scales.append(float(state.scale))
    >>> scales
    [65536.0, 65536.0, 131072.0, 65536.0]
    """

    dynamic: bool = False
    initial: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0

    def init(self, n_leaves: int) -> LossScale:
        """Create the state before the first step, for a gradient of `n_leaves` leaves."""
        return LossScale(
            scale=jnp.asarray(self.initial, jnp.float32),
            hysteresis=jnp.asarray(self.hysteresis, jnp.int32),
            iteration=jnp.asarray(0, jnp.int32),
            last_overflow=jnp.asarray(-1, jnp.int32),
            stuck=jnp.asarray(0, jnp.int32),
            skipped=jnp.asarray(0, jnp.int32),
            culprits=jnp.zeros(n_leaves, bool),
        )

    def at_minimum(self, state: LossScale) -> jax.Array | bool:
        """Return whether the scale cannot go lower."""
        return state.scale <= self.minimum if self.dynamic else True

    def update(self, state: LossScale, finite_leaves: jax.Array) -> LossScale:
        """Compute the state after a step, which is skipped if any of `finite_leaves` (bool[n]) is False."""
        overflow = ~jnp.all(finite_leaves)
        at_minimum = self.at_minimum(state)
        running = jnp.any(state.culprits)
        first = jnp.where(running, state.culprits, ~finite_leaves)
        counted = LossScale(
            scale=state.scale,
            hysteresis=state.hysteresis,
            iteration=state.iteration + 1,
            last_overflow=jnp.where(overflow, state.iteration, state.last_overflow),
            stuck=jnp.where(overflow & at_minimum, state.stuck + 1, 0),
            skipped=state.skipped + overflow,
            culprits=jnp.where(overflow, first, False),
        )
        if not self.dynamic:
            return counted
        halve = overflow & (state.hysteresis == 1)
        stable = state.iteration - state.last_overflow - 1
        double = ~overflow & (stable > 0) & (stable % self.window == 0)
        refill = ~overflow if self.consecutive else double
        halved = jnp.maximum(state.scale / 2, self.minimum)
        doubled = jnp.minimum(state.scale * 2, _LARGEST)  # never inf: half of inf is inf
        scale = jnp.where(halve, halved, jnp.where(double, doubled, state.scale))
        spent = jnp.where(overflow & ~halve, state.hysteresis - 1, state.hysteresis)
        return LossScale(**{**vars(counted), "scale": scale, "hysteresis": jnp.where(refill, self.hysteresis, spent)})


def check_stuck(state: LossScale, names: Sequence[str]) -> None:
    """Raise if training is stuck. This waits for the device: call it where the host reads metrics anyway.

    Args:
      state: the state after a step.
      names: the gradient leaves' names, in the order of `jax.tree.leaves`.

    Raises:
      NonFiniteError: `MAX_STUCK` or more steps in a row were skipped at the minimum scale.
    """
    if int(state.stuck) < MAX_STUCK:
        return
    first = [name for name, bad in zip(names, np.asarray(state.culprits), strict=True) if bad]
    raise NonFiniteError(
        f"{int(state.stuck)} optimizer steps in a row were skipped because the gradients were not finite, at loss "
        f"scale {float(state.scale):g}, which cannot go lower. First not finite: {some_of(first, 10)}. "
        'With fp16, train in bf16 ("bf16": {"enabled": true}), which has the range of fp32 and needs no loss scale; '
        "otherwise look at the data and the learning rate of these steps."
    )
