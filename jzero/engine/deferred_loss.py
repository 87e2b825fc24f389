"""The loss that the three-call loop returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Loss:
    """The loss of a micro-batch, computed when somebody looks at it.

    The three-call loop runs the same compiled program as `train_batch`, at `step()`. A loss that is read after that
    comes from it for free; one that is read before costs a forward pass of its own.
    """

    def __init__(self, compute: Callable[[], Any]):
        self._compute: Callable[[], Any] | None = compute
        self._value: Any = None

    @property
    def value(self) -> jax.Array:
        if self._compute is not None:
            self._value, self._compute = self._compute(), None  # and lets go of the micro-batch
        return self._value

    def item(self) -> float:
        return float(self.value)

    __float__ = item

    def __jax_array__(self) -> jax.Array:
        return self.value

    # Arithmetic for running sums; what comes of it is no loss to call backward with.
    def __add__(self, other: Any) -> jax.Array:
        return self.value + jnp.asarray(other)

    def __sub__(self, other: Any) -> jax.Array:
        return self.value - jnp.asarray(other)

    def __mul__(self, other: Any) -> jax.Array:
        return self.value * jnp.asarray(other)

    def __truediv__(self, other: Any) -> jax.Array:
        return self.value / jnp.asarray(other)

    __radd__, __rmul__ = __add__, __mul__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"Loss({'not computed yet' if self._compute else self.item()})"
