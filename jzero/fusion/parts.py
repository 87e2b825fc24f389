"""Elementwise functions of the parts of arrays, in one pass over memory where there is a kernel."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jzero._compat import function_primitive
from jzero.fusion.elementwise import each

_BEFORE_AMPERE = re.compile(r"\b(T4|[PV]100|TITAN|GTX|RTX 20\d\d|RTX [3-8]000)\b")


def map_parts(f: Callable, xs: Sequence[jax.Array], parts: Sequence[int]) -> list[jax.Array]:
    """Compute an elementwise function of all parts of some arrays.

    Args:
      f: takes one float32 array for each part of each operand, and returns one for each part of each result.
      xs: [M, P, N], of one dtype.
      parts: how many parts each result has.

    Returns:
      [M, Q, N] for each Q of `parts`, in the dtype of xs.
    """
    jaxpr = jax.make_jaxpr(partial(_plain, f, tuple(parts)))(*xs)
    return _primitive.bind(*xs, jaxpr=jaxpr, f=f)


def has_triton(device: Any) -> bool:
    """Return whether Triton's kernels run on a device, or on those that a mesh describes: NVIDIA's from Ampere on."""
    return device.platform == "gpu" and not _BEFORE_AMPERE.search(device.device_kind)


def _plain(f: Callable, parts: tuple[int, ...], *xs: jax.Array) -> list[jax.Array]:
    found = iter(f(*each(xs)))
    return [jnp.stack([y.astype(xs[0].dtype) for y in itertools.islice(found, n)], axis=1) for n in parts]


def _kernel(operands: Any, results: Any, device: Any, f: Callable) -> Any:
    """Choose a kernel; None: XLA's program."""
    from jzero.fusion import triton

    if not has_triton(device) or not triton.supports([x.shape for x in (*operands, *results)]):
        return None
    return partial(triton.map_parts, f, parts=[y.shape[1] for y in results])


_primitive = function_primitive("map_parts", _kernel)
