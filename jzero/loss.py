"""What a model's loss returns: a mean, or (sum, count); and the count, known before the backward pass.

The gradient of the global batch's mean is d(sum of sums) / (sum of counts). Half precision needs the division at the
start of the backward pass: gradients of a sum over a million pixels overflow in float16, those of a micro-batch's sum
that is divided too often underflow. So the counts are computed first. They almost always depend on the batch alone
(labels that count, pixels), and then cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import ConfigError
from jzero.jaxpr import Literal, Program, inlined
from jzero.model import ENDS, STACK, Model, StackModel, fold
from jzero.tree import PyTree

Counter = Callable[[PyTree, Any], Any]  # (micro-batch, key) -> count


def sum_and_count(loss: Any) -> tuple[jax.Array, jax.Array]:
    """Read a model's loss as float32 (sum, count); a mean has count 1.

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
    """Replace a count of 0 by 1, to divide by: where nothing counts the sum is zero too."""
    return jnp.where(count == 0, 1, count)


def counter(model: Model, params: PyTree, part: PyTree, key: Any) -> Counter | float | None:
    """Extract from the loss the computation of its count.

    The loss is traced, and the equations that its count needs are cut out of it.

    Args:
      params, part, key: of these shapes: the whole weights, one micro-batch, its key. Nothing is computed with them.

    Returns:
      (micro-batch, key) -> count; 1.0 if the loss is a mean; None if the count depends on the parameters.
    """
    is_mean = False

    def count(params: PyTree, hidden: PyTree, part: PyTree, key: Any) -> jax.Array:
        nonlocal is_mean
        if isinstance(model, StackModel):
            loss = _suffix_loss(model, params, hidden, part, key)
        else:
            loss = model.loss(params, part, key)
        is_mean = not isinstance(loss, tuple)
        return sum_and_count(loss)[1]

    hidden = None
    if isinstance(model, StackModel):
        hidden = jax.eval_shape(lambda ends: model.prefix(ends, part, fold(key, 0)), params[ENDS])
    args = params, hidden, part, key
    traced = jax.make_jaxpr(count)(*args)
    if is_mean:
        return 1.0
    program = Program(jax.make_jaxpr(lambda *values: inlined(traced, values))(*jax.tree.leaves(args)))
    n = len(jax.tree.leaves((params, hidden)))
    unknown, known = program.inputs[:n], program.inputs[n:]
    (counted,) = program.outputs
    if not isinstance(counted, Literal) and counted in program.reached_from(unknown):
        return None
    eqns = program.needed(program.outputs, given=known)
    return lambda part, key: program.run(eqns, known, jax.tree.leaves((part, key)))(program.outputs)[0]


def _suffix_loss(model: StackModel, params: PyTree, hidden: PyTree, part: PyTree, key: Any) -> Any:
    """Compute the loss of prefix and suffix around a stack that is not run.

    `hidden` stands for the values that a block changes. A value that it passes through (a mask) is the prefix's.
    """
    x = model.prefix(params[ENDS], part, fold(key, 0))
    y = model.block(jax.tree.map(lambda w: w[0], params[STACK]), x, fold(key, 1))
    x = jax.tree.map(lambda x, y, hidden: x if y is x else hidden, x, y, hidden)
    length = jax.tree.leaves(params[STACK])[0].shape[0]
    return model.suffix(params[ENDS], x, part, fold(key, length + 1))
