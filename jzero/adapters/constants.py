"""The constants of a Flax module: arrays that it holds besides its parameters, such as masks and rotary tables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

_SHAPES_ONLY: ContextVar[bool] = ContextVar("shapes_only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Trace constants like everything else, for `jax.eval_shape` before a JAX backend may start."""
    token = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(token)


def same(x: Any, y: Any) -> bool:
    """Return whether two constants have the same values, under any trace; NaN equals NaN."""
    with jax.ensure_compile_time_eval():
        return bool(((x == y) | ((x != x) & (y != y))).all())


class Constants:
    """The arrays that a function builds from nothing.

    Args:
      build: builds a module and returns {name: array} of its constants.
    """

    def __init__(self, build: Callable[[], dict[str, Any]]):
        self.build = build

    @property
    def values(self) -> dict[str, Any]:
        """{name: array}; NumPy arrays stay NumPy, because users index Python lists with them."""
        return self.build() if _SHAPES_ONLY.get() else self._values

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        """The values, computed at the first use.

        Not earlier: a model is made before its process joins the others, and until then no JAX backend may start. At
        the first use a trace is active, but a function compiled ahead of time still runs. Its only outputs are the
        constants, so XLA drops the initialisation of the parameters, which need not fit into memory.
        """
        of_numpy: dict[str, np.ndarray] = {}
        made = jax.jit(lambda: self._split(of_numpy)).lower().compile()()
        return of_numpy | made

    @functools.cached_property
    def fingerprint(self) -> Any:
        """A value that is equal only for equal constants: the program that computes them, which needs no backend."""
        of_numpy: dict[str, np.ndarray] = {}
        program = jax.make_jaxpr(lambda: self._split(of_numpy))()
        closed_over = [*of_numpy.values(), *program.consts]
        return str(program.jaxpr), [(np.shape(x), np.asarray(x).tobytes()) for x in closed_over]

    def _split(self, of_numpy: dict[str, np.ndarray]) -> dict[str, Any]:
        """Build the constants; put NumPy arrays into `of_numpy`, and return the others."""
        arrays = self.build()
        of_numpy.update({name: x for name, x in arrays.items() if isinstance(x, np.ndarray)})
        return {name: x for name, x in arrays.items() if name not in of_numpy}
