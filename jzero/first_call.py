"""The first call of a train step: the shapes that its program is compiled for, and its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jzero.programs import Fed
from jzero.tree import PyTree
from jzero.update import Conditions


class FirstCall:
    """The shapes of a program's first call; nothing before `note`.

    The trace and the program of these shapes are those of the call: JAX finds them in its caches.
    """

    def __init__(self, program: jax.stages.Wrapped, state_shapes: PyTree, state_shardings: PyTree):
        self._program = program
        self._state = jax.tree.map(_shape, state_shapes, state_shardings)
        self._rest: tuple | None = None  # of batch, extra, rate and conditions

    @property
    def is_known(self) -> bool:
        return self._rest is not None

    @property
    def batch_shapes(self) -> PyTree:
        """The shapes of the global batch; None before the first call."""
        return self._rest and self._rest[0]

    def note(self, fed: Fed, rate: np.float32 | None, only: Conditions) -> None:
        """Keep the shapes of a call."""
        of_halted = jax.tree.map(_shape, only.halted)
        self._rest = (*jax.tree.map(_shape, (fed.batch, fed.extra)), rate, only._replace(halted=of_halted))

    def forget(self) -> None:
        """Forget the shapes: another call comes first."""
        self._rest = None

    def traced(self, change: Callable[[PyTree], PyTree] = lambda batch: batch) -> jax.stages.Traced | None:
        """Trace the call, with another batch if `change` maps the shapes of its own; None before it."""
        if self._rest is None:
            return None
        batch, *rest = self._rest
        return self._program.trace(self._state, change(batch), *rest)


def _shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Return all that JAX knows an array by when it looks up a trace."""
    weak = getattr(x, "weak_type", False)  # keys have no such attribute
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding, weak_type=weak)
