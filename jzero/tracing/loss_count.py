"""The count of a loss, known before the backward pass.

The gradient of the global batch's mean is d(sum of sums) / (sum of counts). Half precision needs the division at the
start of the backward pass: the gradients of a sum over a million pixels overflow in float16, and underflow if the
divisor is too large. So the counts are computed first. They almost always depend on the batch alone (valid labels,
pixels), and then cost next to nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jzero._compat import needed_part
from jzero.errors import ConfigError, some_of
from jzero.loss import LOSS, Mean, read_loss
from jzero.model import Inputs, Model, loss_of_passes
from jzero.tree import PyTree, named

LARGE_CONSTANT = 16 * 2**20  # bytes

Counter = Callable[[Inputs, jax.Array | None], jax.Array]  # (micro-batch, key) -> count


def counter(model: Model, params: PyTree, part: Inputs, key: jax.Array | None) -> Counter | float | None:
    """Extract the computation of the count from the loss.

    The loss is traced, and every operation that the count does not need is removed.

    Args:
      params, part, key: the whole weights, one micro-batch, its key; only their shapes are used.

    Returns:
      (micro-batch, key) -> count; 1.0 if the loss is a mean; None if the count depends on the parameters, or if
      the loss cannot be traced as a whole.
    """
    is_mean = False

    def count(params: PyTree, part: Inputs, key: jax.Array | None) -> jax.Array:
        nonlocal is_mean
        value, _ = loss_of_passes(model)(params, part, key)
        parts = read_loss(model, value)
        is_mean = not isinstance(value[0] if getattr(model, "has_aux", False) else value, Mean)
        return parts[LOSS].count

    try:
        traced = jax.make_jaxpr(count)(params, part, key)
    except Exception:
        # The plain loss scans the stack, so a block that changes its dtype fails here. The passes may run it unrolled,
        # or have the better error.
        return None
    _warn_of_large(traced.consts)
    if is_mean:
        return 1.0
    run, used = needed_part(traced)
    names = [name for name, is_used in zip(named(params), used, strict=False) if is_used]
    if moving := sorted(set(names) & set(getattr(model, "state", ()))):
        raise ConfigError(
            f"the count of the loss depends on the model's state ({some_of(moving)}), which changes with every "
            "micro-batch: count by the batch or the parameters"
        )
    if names:
        return None
    return lambda part, key: run([None] * len(jax.tree.leaves(params)) + jax.tree.leaves((part, key)))[0]


def _warn_of_large(constants: Sequence[Any]) -> None:
    """Name large arrays that the loss closes over: each device keeps its own copy of them, in the program."""
    large = [x for x in constants if getattr(x, "nbytes", 0) >= LARGE_CONSTANT]
    if large:
        names = ", ".join(f"{x.dtype}{list(x.shape)} ({x.nbytes / 2**20:.0f} MiB)" for x in large)
        warnings.warn(
            f"the loss closes over {names}: a constant of the compiled program, the same in every step. If it "
            "changes between steps, pass it as extra=...",
            stacklevel=2,
        )
