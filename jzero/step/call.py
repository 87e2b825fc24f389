"""A compiled program and what surrounds each of its runs: every program of a train step is run by a `Call`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from jzero.display.slow_work import compiling, slow_work
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import Guard
from jzero.tree import PyTree


class Call:
    """A compiled program. A run of it, in order:

    1. The processes agree on the shapes of the batch, once for each program: a difference would end in a hang.
    2. Process 0 shows that the first run for these shapes compiles.
    3. The heartbeat counts the run as begun, and as finished when its results are there.

    Args:
      name: as "the step", for errors and for the notice.
      program: what `jax.jit` returned: (state or parameters, batch, extra, ...) -> results.
      last: (results) -> those that no later program is given to reuse; default: all. All are ready at the same time.
      steady: whether each run takes as long as the one before it: the train step.
    """

    def __init__(
        self, name: str, program: Any, guard: Guard, last: Callable[[Any], Any] = lambda results: results,
        steady: bool = False,
    ):  # fmt: skip
        self.name, self.program, self.guard = name, program, guard
        self._last, self._steady = last, steady
        self._shapes: set[Any] = set()  # of former runs

    def __repr__(self) -> str:
        return f"Call({self.name}, {len(self._shapes)} compiled)"

    def __call__(self, state: PyTree, batch: PyTree, extra: PyTree, *rest: Any, of: str = "", **static: Any) -> Any:
        """Run the program on a batch and what goes with it, both on the devices.

        Args:
          of: more of the name, where it differs from run to run.

        Raises:
          ConfigError: the processes' batches differ.
        """
        self.guard.check(self.name + of, batch, extra)
        leaves = jax.tree.leaves((batch, extra))
        shapes = of, jax.tree.structure(rest), *[(type(x), x.shape, x.dtype) for x in leaves]
        known = shapes in self._shapes
        notice = contextlib.nullcontext() if known else slow_work(compiling(self.name))
        with heartbeat.work(known and self._steady and self.guard.shared) as finished_when, notice:
            results = self.program(state, batch, extra, *rest, **static)
            finished_when(next(iter(jax.tree.leaves(self._last(results))), None))
        self._shapes.add(shapes)
        return results
