"""The loss that the three-call loop returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
CONVERSIONS = ("neg", "pos", "abs", "bool", "int", "float", "complex", "round")


class Loss:
    """The loss of a micro-batch, computed when it is first read; otherwise like a JAX scalar.

    The three-call loop runs the program of `train_batch`, at `step()`. A loss read after `step()` is free; a loss
    read before it costs an extra forward pass. Arithmetic returns an array, which `engine.backward` does not take.
    """

    def __init__(self, compute: Callable[[], Any]):
        self._compute: Callable[[], Any] | None = compute
        self._value: Any = None

    @property
    def value(self) -> jax.Array:
        if self._compute is not None:
            self._value, self._compute = self._compute(), None  # frees the micro-batch that it closes over
        return self._value

    def replace(self, compute: Callable[[], Any]) -> None:
        """Use `compute` as the source of the loss, unless the loss is already computed."""
        if self._compute is not None:
            self._compute = compute

    def item(self) -> float:
        return float(self.value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols (copy, pickle, ...) ask for these, and must not start a forward pass
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value, name)

    __hash__ = object.__hash__  # __eq__ below would remove it

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"Loss({'not computed yet' if self._compute else self.item()})"


def _delegate(name: str) -> Callable:
    def method(self: Loss, *others: Any) -> Any:
        return getattr(self.value, name)(*(x.value if isinstance(x, Loss) else x for x in others))

    return method


# Python looks operators up on the class, so __getattr__ does not see them.
for _name in (*COMPARISONS, *ARITHMETIC, *(f"r{name}" for name in ARITHMETIC), *CONVERSIONS):
    setattr(Loss, f"__{_name}__", _delegate(f"__{_name}__"))

# jnp's functions are jitted, and jit flattens its arguments: as a tree, a loss is its value.
jax.tree_util.register_pytree_node(Loss, lambda loss: ((loss.value,), None), lambda _, leaves: leaves[0])
