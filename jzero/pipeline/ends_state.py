"""The state of prefix and suffix, which must move in a pipeline as it does in sequence.

In sequence a micro-batch runs its prefix, the stack and its suffix before the next one begins. In a pipeline the
prefixes of the next micro-batches run before the suffix, and a prefix runs once more for its backward pass, when its
state has moved on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jzero.errors import ConfigError, some_of
from jzero.model import ENDS, replace_state
from jzero.sharding import is_state
from jzero.tracing.equations import touched
from jzero.tree import PyTree, partition


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

    def output(state: Any, ends: Any) -> Any:
        return prefix(replace_state(ends, state))[0], {}

    def first(state: Any, ends: Any) -> Any:
        return prefix(replace_state(ends, state))

    def last(state: Any, ends: Any, x: Any) -> Any:
        return suffix(replace_state(ends, state), x)

    (by_first, of_first), (by_last, of_last) = touched(first, state, ends), touched(last, state, ends, x)
    if shared := by_first & (by_last | of_last) | by_last & of_first:
        names = some_of(f"{ENDS}/{name}" for name in sorted(shared))
        raise ConfigError(
            f"pipeline: prefix and suffix share the state {names}, and one of them replaces it, but the next "
            "micro-batch's prefix runs before the suffix: give each its own, or train without a pipeline"
        )
    return bool(touched(output, state, ends)[1])
