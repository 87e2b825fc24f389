"""The micro-batches of a step: taken from an iterator, or collected call by call until the next update."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero.data import DataLoader
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import share_problem
from jzero.errors import ConfigError, some_of
from jzero.run.clock import DATA, PEERS
from jzero.run.deferred_loss import Loss
from jzero.tree import named


class Held(NamedTuple):
    """A micro-batch on the devices, its loss, and what the loss takes besides it."""

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
      divided: whether each loss is divided by the number of micro-batches that the config counts.
    """

    def __init__(self, managed: bool):
        self.managed = managed
        self.queue: list[Held] = []
        self.forward: Held | None = None
        self.boundary: bool | None = None
        self.divided = True
        self._syncing = True
        self._calls = 0  # of step() since the last update

    def add(self, loss: Loss, divided: bool) -> None:
        """Queue the micro-batch of the last forward pass.

        `loss` must be its loss, and its extra and `divided` those of the step's other micro-batches.
        """
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
        if self.queue and divided != self.divided:
            raise ConfigError(
                f"backward: scale_wrt_gas = {divided}: the {len(self.queue) + 1} micro-batches of a step differ; pass "
                "the same with all of them"
            )
        self.queue.append(self.forward)
        self.forward, self.divided = None, divided

    def is_boundary(self, accum: int) -> bool:
        """Return whether the next `step()` updates, with `accum` micro-batches per update."""
        if self.boundary is not None:
            return self.boundary
        waiting = max(self._calls + 1, len(self.queue) + (self.forward is not None))
        return not self.managed or waiting >= accum

    def factor(self, micro_batches: int, accum: int) -> float:
        """Return what makes the gradient of the mean over micro-batches DeepSpeed's sum over calls of backward."""
        return micro_batches / accum if self.divided else micro_batches

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
        # By their own `all`: np.all takes no tensors of torch, and another process may hold a part of an array of JAX.
        return x is y or (np.shape(x) == np.shape(y) and bool((x == y).all() if np.ndim(x) else x == y))

    one, other = named(first), named(second)
    return [n or "extra" for n in one | other if n not in one or n not in other or not equal(one[n], other[n])]


def next_micro_batches(
    source: Iterator[Any], accum: int, *, ours: bool,
    timed: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
) -> list[Any]:  # fmt: skip
    """Take the next `accum` micro-batches.

    Args:
      ours: whether they come from the training_data passed to `initialize`.
      timed: times a part of the engine's clock.

    Raises:
      ConfigError: the iterator ended early on some process; without this error, the others would wait forever.
    """
    with timed(DATA):
        micro_batches = list(itertools.islice(source, accum))
    problem = None
    if len(micro_batches) < accum:
        of = f" of process {jax.process_index()}" if jax.process_count() > 1 else ""
        fix = "jzero.RepeatingLoader starts a loader again"
        if ours:
            fix = "training_data was an iterator, which is used up: give a function that makes one"
        problem = (
            f"the iterator{of} ended after {len(micro_batches)} of {accum} micro-batches "
            f"(gradient_accumulation_steps = {accum}); {fix}"
        )
    if jax.process_count() > 1:
        with timed(PEERS), heartbeat.waiting():  # another process may have stopped, or its data have
            problem = share_problem("the data's end", problem)
    if problem:
        raise ConfigError(problem)
    return micro_batches


def position(loader: DataLoader | None) -> list[int] | None:
    """Return the position in the training data as a list; None without such data."""
    return None if loader is None else list(loader.position.values())


def one_batch(batch: tuple, named: dict[str, Any]) -> Any:
    """Return the one batch that a call was given, in its place or by names."""
    if len(batch) + bool(named) != 1:
        raise ConfigError(
            f"engine(...): {len(batch) + len(named)} arguments: a micro-batch is one argument: engine(batch) or "
            "engine(**batch), with a tuple for several arrays: engine((inputs, labels)); extra= goes by name"
        )
    return named or batch[0]
