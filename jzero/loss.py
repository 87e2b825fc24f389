"""A model's loss: a mean, or (sum, count); and the count, known before the backward pass.

The gradient of the global batch's mean is d(sum of sums) / (sum of counts). Half precision needs the division at the
start of the backward pass: the gradients of a sum over a million pixels overflow in float16, and underflow if the
divisor is too large. So the counts are computed first. They almost always depend on the batch alone (valid labels,
pixels), and then cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._compat import needed_part
from jzero.errors import ConfigError
from jzero.model import Model
from jzero.tree import PyTree

Counter = Callable[[PyTree, Any], Any]  # (micro-batch, key) -> count


def sum_and_count(loss: Any) -> tuple[jax.Array, jax.Array]:
    """Convert a model's loss to float32 (sum, count); a mean has count 1.

    Raises:
      ConfigError: a loss that is neither a scalar nor a pair of scalars.
    """
    parts = loss if isinstance(loss, tuple) else (loss, 1.0)
    for part in parts if len(parts) == 2 else [loss]:
        if not isinstance(part, jax.Array | np.ndarray | np.generic | float | int) or jnp.shape(part):
            found = f"of shape {jnp.shape(part)}" if hasattr(part, "shape") else f"{type(part).__name__}"
            raise ConfigError(
                f"the model's loss is or contains a value {found}: it must be a scalar, or (sum, count) of two "
                "scalars; other outputs are not supported (write loss.mean())"
            )
    total, count = parts
    return jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32)


def nonzero(count: jax.Array) -> jax.Array:
    """Return a count that is safe to divide by: 0 becomes 1, since the sum is then 0 too.

    An infinite count (an overflow in float16) becomes NaN, so that the step is skipped; dividing by it would give 0.
    """
    return jnp.where(count == 0, 1, jnp.where(jnp.isinf(count), jnp.nan, count))


def counter(model: Model, params: PyTree, part: PyTree, key: Any) -> Counter | float | None:
    """Extract the computation of the count from the loss.

    The loss is traced, and every operation that the count does not need is removed.

    Args:
      params, part, key: the whole weights, one micro-batch, its key; only their shapes are used.

    Returns:
      (micro-batch, key) -> count; 1.0 if the loss is a mean; None if the count depends on the parameters, or if
      the loss cannot be traced as a whole.
    """
    is_mean = False

    def count(params: PyTree, part: PyTree, key: Any) -> jax.Array:
        nonlocal is_mean
        loss = model.loss(params, part, key)
        is_mean = not isinstance(loss, tuple)
        return sum_and_count(loss)[1]

    try:
        traced = jax.make_jaxpr(count)(params, part, key)
    except Exception:
        # The plain loss scans the stack, so a block that changes its dtype fails here. The passes may run it unrolled,
        # or have the better error.
        return None
    if is_mean:
        return 1.0
    run, used = needed_part(traced)
    if any(used[: len(jax.tree.leaves(params))]):
        return None
    return lambda part, key: run([None] * len(jax.tree.leaves(params)) + jax.tree.leaves((part, key)))[0]
