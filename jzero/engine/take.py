"""Taking the micro-batches of a step from an iterator."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import anyone
from jzero.engine.clock import DATA, PEERS
from jzero.errors import ConfigError


def take(
    source: Iterator[Any], accum: int, *, ours: bool,
    part: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
) -> list[Any]:  # fmt: skip
    """Take the next `accum` micro-batches.

    Args:
      ours: whether they come from the training_data passed to `initialize`.
      part: times a part of the engine's clock.

    Raises:
      ConfigError: the iterator ended early on some process; without this error, the others would wait forever.
    """
    with part(DATA):
        parts = list(itertools.islice(source, accum))
    problem = None
    if len(parts) < accum:
        of = f" of process {jax.process_index()}" if jax.process_count() > 1 else ""
        fix = "jzero.RepeatingLoader starts a loader again"
        if ours:
            fix = "training_data was an iterator, which is used up: give a function that makes one"
        problem = (
            f"the iterator{of} ended after {len(parts)} of {accum} micro-batches (gradient_accumulation_steps = "
            f"{accum}); {fix}"
        )
    if jax.process_count() > 1:
        with part(PEERS), heartbeat.waiting():  # another process may have stopped, or its data have
            problem = anyone("the data's end", problem)
    if problem:
        raise ConfigError(problem)
    return parts
