"""The results of a model's loss: a loss, and metrics besides."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import ConfigError

LOSS = "loss"
STEP_METRICS = (LOSS, "grad_norm", "lr", "loss_scale", "skipped")  # the train step's own
SCALING = ("loss_scale", "skipped")  # of them, those that change under fp16 alone

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
        return {LOSS: _sum_and_count(LOSS, value)}
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
    return {LOSS: _sum_and_count(LOSS, loss)} | {
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
    for part in (total, count):
        if jnp.iscomplexobj(part):
            raise ConfigError(
                f"the model's {what} is {jnp.result_type(part)}: it must be real; write jnp.real(x) or jnp.abs(x)"
            )
    if what == LOSS and not jnp.issubdtype(dtype := jnp.result_type(total), jnp.floating):
        raise ConfigError(
            f"the model's loss is {dtype}, which has no gradient: it must be a float; return an accuracy or a number "
            "of errors as a metric (has_aux=True)"
        )
    return Mean(jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32))


def pack_sums(parts: dict[str, Mean]) -> Sums:
    """Stack every sum and count, so that each pair travels as one array."""
    return {name: jnp.stack(part) for name, part in parts.items()}


def read_sums(model: Any, value: Any) -> Sums:
    """Read what the model's loss returned, in the form that travels."""
    return pack_sums(read_loss(model, value))


def means(sums: Sums) -> Sums:
    """Divide sums by counts: {name: [..., 2]} -> {name: [...]}."""
    return {name: x[..., 0] / nonzero(x[..., 1]) for name, x in sums.items()}


def nonzero(count: jax.Array) -> jax.Array:
    """Return a count that is safe to divide by: 0 becomes 1, since the sum is then 0 too.

    An infinite count (an overflow in float16) becomes NaN, so that the step is skipped; dividing by it would give 0.
    """
    return jnp.where(count == 0, 1, jnp.where(jnp.isinf(count), jnp.nan, count))


def weighted(parts: dict[str, Mean], cotangents: Mean) -> tuple[jax.Array, Sums]:
    """Return (the loss's sum and count times their cotangents, to differentiate; the loss and metrics, carried along).

    With S the sum of sums and C that of counts, d(S / C) = (dS - S / C dC) / C. A count that does not depend on the
    parameters has the cotangent None.
    """
    loss = parts[LOSS]
    to_differentiate = loss.sum * cotangents.sum
    if cotangents.count is not None:
        to_differentiate += loss.count * cotangents.count
    return to_differentiate, pack_sums(parts)


def total(seen: Sums) -> Sums:
    """Sum over the micro-batches: {name: [accum, 2]} -> {name: [2]}."""
    return {name: x.sum(0) for name, x in seen.items()}
