"""Bookkeeping for the three-call loop: the micro-batches that wait for the next update, and when it is due."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.engine.deferred_loss import Loss
from jzero.errors import ConfigError, some_of
from jzero.tree import named


class Held(NamedTuple):
    """A micro-batch on the devices, its loss, and what the loss takes beside it."""

    batch: Any
    loss: Loss
    extra: Any


class Accumulation:
    """The micro-batches of a step, collected call by call.

    Args:
      managed: count the calls of `step()`; False: every call updates.

    Attributes:
      queue: the micro-batches whose backward was called, in order.
      forward: the last forward pass, until its backward.
      boundary: whether the next `step()` updates, as set by the user; None: decided by the count of calls.
    """

    def __init__(self, managed: bool):
        self.managed = managed
        self.queue: list[Held] = []
        self.forward: Held | None = None
        self.boundary: bool | None = None
        self._syncing = True
        self._calls = 0  # of step() since the last update

    def add(self, loss: Loss) -> None:
        """Queue the micro-batch of the last forward pass; `loss` must be its loss, and its extra that of the others."""
        if self.forward is None or loss is not self.forward.loss:
            raise ConfigError(
                f"backward: {loss!r} is not the loss that the last engine(micro_batch) returned (with a criterion "
                "outside of the model: engine.loss(outputs, labels)); what changes the loss belongs into the loss "
                "function"
            )
        if self.queue and (names := _differing(self.queue[0].extra, self.forward.extra)):
            raise ConfigError(
                f"extra: the {len(self.queue) + 1} micro-batches of a step differ in {some_of(names)}: pass the same "
                "extra with all of them, or set gradient_accumulation_steps to 1"
            )
        self.queue.append(self.forward)
        self.forward = None

    def is_boundary(self, accum: int) -> bool:
        """Return whether the next `step()` updates, with `accum` micro-batches per update."""
        if self.boundary is not None:
            return self.boundary
        waiting = max(self._calls + 1, len(self.queue) + (self.forward is not None))
        return not self.managed or waiting >= accum

    def finish(self, accum: int) -> list[Held]:
        """Count a call of `step()`; return the micro-batches to update with, none before the boundary."""
        if not self._syncing:
            raise ConfigError("step() inside no_sync(): leave the context first")
        if not self.queue:
            raise ConfigError("step() without a backward(): call engine.backward(engine(micro_batch)) first")
        self.forward = None  # a forward pass without a backward takes no part
        boundary = self.is_boundary(accum)
        self._calls = 0 if boundary else self._calls + 1
        if not boundary:
            return []
        queue, self.queue = self.queue, []
        return queue

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forbid `step()` inside this context."""
        if not self._syncing:
            raise ConfigError("no_sync() inside no_sync(): one is enough")
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def check_empty(self, call: str) -> None:
        """Raise a ConfigError if micro-batches wait; `call` is the method that must not run then."""
        if self.queue:
            raise ConfigError(f"{call}: {len(self.queue)} micro-batches wait for step(); call engine.step() first")


def _differing(first: Any, second: Any) -> list[str]:
    """List the leaves in which two extras differ."""

    def equal(x: Any, y: Any) -> bool:
        if x is y:
            return True
        alike = np.shape(x) == np.shape(y)
        if isinstance(x, jax.Array) or isinstance(y, jax.Array):
            return alike and bool((x == y).all())  # on the devices: another process may hold a part of them
        return alike and bool(np.array_equal(x, y))

    one, other = named(first), named(second)
    return [n or "extra" for n in one | other if n not in one or n not in other or not equal(one[n], other[n])]
