"""What a model's loss gives: a loss, and metrics beside it; and the loss's count, known before the backward pass.

The gradient of the global batch's mean is d(sum of sums) / (sum of counts). Half precision needs the division at the
start of the backward pass: the gradients of a sum over a million pixels overflow in float16, and underflow if the
divisor is too large. So the counts are computed first. They almost always depend on the batch alone (valid labels,
pixels), and then cost next to nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero._compat import needed_part
from jzero.errors import ConfigError, some_of
from jzero.model import Inputs, Model, uniform
from jzero.tree import PyTree, named

LOSS = "loss"
LARGE_CONSTANT = 16 * 2**20  # bytes
STEP_METRICS = (LOSS, "grad_norm", "lr", "loss_scale", "skipped")  # the train step's own

Counter = Callable[[Inputs, Any], Any]  # (micro-batch, key) -> count
Sums = dict[str, jax.Array]  # the loss and the metrics by name, each as float32 (sum, count): [..., 2]


class Mean(NamedTuple):
    """A weighted mean, as a loss or a metric.

    Over micro-batches, replicas and batches it is the sum of sums divided by the sum of counts, for micro-batches of
    any size: the mean over all valid tokens, all pixels, all rows that are no padding.

    Attributes:
      sum: a scalar.
      count: a scalar, the number of elements in the sum; 0 is valid.

    >>> losses, valid = jnp.array([1.0, 2.0, 9.0]), jnp.array([True, True, False])
    >>> Mean(jnp.sum(losses, where=valid), valid.sum())
    Mean(sum=Array(3., dtype=float32), count=Array(2, dtype=int32))
    """

    sum: Any
    count: Any  # type: ignore[assignment]  # a tuple's method of this name is not needed


def read_loss(model: Any, value: Any) -> dict[str, Mean]:
    """Read what the model's loss returned: {"loss": Mean, metric: Mean, ...}, of float32 scalars.

    A scalar has the count 1, so that its mean is the plain mean over micro-batches and replicas.

    Raises:
      ConfigError: a loss or metric that is neither a scalar nor a `Mean`, a bare pair, a metric with a reserved name.
    """
    if not getattr(model, "has_aux", False):
        if isinstance(value, tuple) and not isinstance(value, Mean):
            raise ConfigError(
                f"the model's loss is a tuple of {len(value)} values: return jzero.Mean(sum, count) for a weighted "
                "mean, or set has_aux=True and return (loss, {name: metric})"
            )
        return {LOSS: _sum_and_count("loss", value)}
    if not isinstance(value, tuple) or isinstance(value, Mean) or len(value) != 2 or not isinstance(value[1], dict):
        found = f"an array of shape {value.shape}" if isinstance(value, jax.Array) else type(value).__name__
        found = f"a tuple of {len(value)} values" if type(value) is tuple else found
        raise ConfigError(f"has_aux=True: the loss must return (loss, {{name: metric}}), but returned {found}")
    loss, metrics = value
    for name in metrics:
        if not isinstance(name, str) or name in STEP_METRICS:
            raise ConfigError(
                f"metric {name!r}: must be a string other than {', '.join(STEP_METRICS)}, which the train step reports"
            )
    return {LOSS: _sum_and_count("loss", loss)} | {
        name: _sum_and_count(f"metric {name!r}", metric) for name, metric in metrics.items()
    }


def _sum_and_count(what: str, value: Any) -> Mean:
    """Convert a scalar or a Mean to float32."""
    for part in value if isinstance(value, Mean) else [value]:
        if not isinstance(part, jax.Array | np.ndarray | np.generic | float | int) or jnp.shape(part):
            found = f"has shape {jnp.shape(part)}" if hasattr(part, "shape") else f"is a {type(part).__name__}"
            raise ConfigError(
                f"the model's {what} {found}: it must be a scalar or jzero.Mean(sum, count) of two scalars; "
                "write x.mean(), or jzero.Mean(x.sum(), x.size)"
            )
    total, count = value if isinstance(value, Mean) else (value, 1.0)
    return Mean(jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32))


def pack(parts: dict[str, Mean]) -> Sums:
    """Stack every sum and count, so that each pair travels as one array."""
    return {name: jnp.stack(part) for name, part in parts.items()}


def read_sums(model: Any, value: Any) -> Sums:
    """Read what the model's loss returned, in the form that travels."""
    return pack(read_loss(model, value))


def means(sums: Sums) -> Sums:
    """Divide sums by counts: {name: [..., 2]} -> {name: [...]}."""
    return {name: x[..., 0] / nonzero(x[..., 1]) for name, x in sums.items()}


def nonzero(count: jax.Array) -> jax.Array:
    """Return a count that is safe to divide by: 0 becomes 1, since the sum is then 0 too.

    An infinite count (an overflow in float16) becomes NaN, so that the step is skipped; dividing by it would give 0.
    """
    return jnp.where(count == 0, 1, jnp.where(jnp.isinf(count), jnp.nan, count))


def counter(model: Model, params: PyTree, part: Inputs, key: Any) -> Counter | float | None:
    """Extract the computation of the count from the loss.

    The loss is traced, and every operation that the count does not need is removed.

    Args:
      params, part, key: the whole weights, one micro-batch, its key; only their shapes are used.

    Returns:
      (micro-batch, key) -> count; 1.0 if the loss is a mean; None if the count depends on the parameters, or if
      the loss cannot be traced as a whole.
    """
    is_mean = False

    def count(params: PyTree, part: Inputs, key: Any) -> jax.Array:
        nonlocal is_mean
        value, _ = uniform(model, model.loss)(params, part, key)
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
            f"the loss closes over {names}: a constant of the compiled program, the same in every step. Pass it as "
            "extra=..., unless it is one",
            stacklevel=2,
        )
