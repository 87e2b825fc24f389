"""The arrays that a pipeline stage carries from tick to tick."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero.errors import ConfigError, some_of
from jzero.layout.sharding import is_state
from jzero.mesh import PIPE
from jzero.model import ENDS, replace_state
from jzero.tracing.equations import touched
from jzero.tree import PyTree, partition


class Carry(NamedTuple):
    """The values that a stage carries from tick to tick; M micro-batches. None: an evaluation has no such value.

    Attributes:
      entering: the prefix's output, for the first stage's next forward pass.
      inbox: the output of the stage before.
      returned: the gradient from the stage after.
      leaving: the gradient of this stage's last input.
      stash: residuals between F and B or W, [slots * pieces, ...] each.
      outputs: gpipe's of the chunks, whose suffix runs long after F, [slots, ...] each.
      rest: operands of the weights' gradient between D and W, [slots * pieces, ...] each.
      ends_gradients, stack_gradients: summed so far.
      ends_state, stack_state: the model's, None in the place of parameters.
      former: the ends' state before every micro-batch, [M, ...] each, if the prefix's output depends on it.
      seen: the loss and metrics of every micro-batch, [M, 2] each.
    """

    entering: PyTree
    inbox: PyTree
    returned: PyTree = None
    leaving: PyTree = None
    stash: PyTree = None
    outputs: PyTree = None
    rest: PyTree = None
    ends_gradients: PyTree = None
    stack_gradients: PyTree = None
    ends_state: PyTree = None
    stack_state: PyTree = None
    former: PyTree = None
    seen: PyTree = None


def select(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(partial(jnp.where, condition), x, y)


def from_stage(mine: jax.Array, x: PyTree) -> PyTree:
    """Broadcast x from the stage where `mine` is true to every stage."""
    return jax.tree.map(lambda x: lax.psum(jnp.where(mine, x, jnp.zeros((), x.dtype)), PIPE).astype(x.dtype), x)


def send(x: PyTree, step: int, *, stages: int, wraps: bool) -> PyTree:
    """Send x to the next stage (+1) or the previous one (-1); if `wraps`, the first follows the last."""
    pairs = [(s, (s + step) % stages) for s in range(stages) if wraps or 0 <= s + step < stages]
    return jax.tree.map(lambda x: lax.ppermute(x, PIPE, pairs), x)


def needs_former(prefix: Callable, suffix: Callable, ends: PyTree, x: PyTree, layouts: PyTree) -> bool:
    """Return whether the prefix's output depends on its state, so that its backward pass needs the former state.

    Args:
      prefix, suffix: ends -> (x, new state), and (ends, x) -> (result, new state).
      ends, x: the shapes of the whole weights of both, and of the prefix's output.
      layouts: of the ends.

    Raises:
      ConfigError: prefix and suffix share state, which would move in another order than in sequence.
    """
    state, _ = partition(ends, is_state(layouts))
    if not jax.tree.leaves(state):
        return False

    def first(state: PyTree, ends: PyTree) -> PyTree:
        return prefix(replace_state(ends, state))

    def last(state: PyTree, ends: PyTree, x: PyTree) -> PyTree:
        return suffix(replace_state(ends, state), x)

    (by_first, of_first), (by_last, of_last) = touched(first, state, ends), touched(last, state, ends, x)
    if shared := by_first & (by_last | of_last) | by_last & of_first:
        names = some_of(f"{ENDS}/{name}" for name in sorted(shared))
        raise ConfigError(
            f"pipeline: prefix and suffix share the state {names}, and one of them replaces it, but the next "
            "micro-batch's prefix runs before the suffix: give each its own, or train without a pipeline"
        )
    return bool(touched(lambda *args: (first(*args)[0], {}), state, ends)[1])


def check_chain(x: PyTree, y: PyTree) -> None:
    """Raise a ConfigError unless a block's output is like its input, and can go from stage to stage."""
    for leaf in jax.tree.leaves(x):
        buffer_kind(leaf)  # raises

    taken, given = (jax.tree.map(lambda v: f"{v.dtype.name}{list(v.shape)}", tree) for tree in (x, y))
    if jax.tree.flatten(taken) != jax.tree.flatten(given):
        raise ConfigError(
            f"the layer stack takes {taken} and gives {given}: each layer's output must match the next layer's input"
        )


def buffer_kind(leaf: PyTree) -> str:
    """Return the kind of buffer in which a leaf goes from stage to stage; raise a ConfigError if there is none."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return "float"
    if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == bool:
        return "other"
    raise ConfigError(f"pipeline: {leaf.dtype} cannot go from stage to stage; give floats, integers or bools")
