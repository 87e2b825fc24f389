"""The matrix products of a traced program: how many run in float32, where, and their share of the FLOPs."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, field
from math import prod
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jax.lax import DotAlgorithmPreset

from jzero._compat import inner_jaxprs, without_dead_code
from jzero.tracing.auto_cast import SCOPE as AUTO_CAST
from jzero.update import SCOPE as UPDATE

# Code that computes products for a model. The newest frame elsewhere is the model's.
_JZERO = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = (_JZERO, *(os.path.join(library.__path__[0], "") for library in (jax, flax, optax)))
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple(os.path.join(_PYTHON, f"{kind}-packages", "") for kind in ("site", "dist"))
_MODELS = os.path.join(_JZERO, "models", "")  # of an installed jzero
_HALF = (
    DotAlgorithmPreset.F16_F16_F16,
    DotAlgorithmPreset.F16_F16_F32,
    DotAlgorithmPreset.BF16_BF16_BF16,
    DotAlgorithmPreset.BF16_BF16_F32,
)


@dataclass(frozen=True)
class Product:
    """One dot_general or convolution of a program.

    Attributes:
      where: the line of the model, "Net.__call__ (net.py:12)".
      wide: whether it runs in float32, because an operand is float32. A product of half-precision operands whose sum
        is float32 is not.
      times: how often it runs in one call of the program, on each device.
      flops: of all these times.
    """

    where: str
    wide: bool
    times: int
    flops: float


@dataclass(frozen=True)
class Products:
    """The floating-point matrix products of a program on each device.

    Attributes:
      all: in the program's order.
      cast: the names of the batch's arrays that `auto_cast` casts.

    `str()` lists the lines of the model whose products run in float32.
    """

    all: tuple[Product, ...] = field(repr=False)
    cast: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return sum(p.times for p in self.all)

    @property
    def float32(self) -> int:
        """How many run in float32."""
        return sum(p.times for p in self.all if p.wide)

    @property
    def flops(self) -> float:
        return sum(p.flops for p in self.all)

    @property
    def float32_share(self) -> float:
        """The share of the FLOPs that runs in float32, from 0 to 1."""
        return sum(share for _, share in self.float32_by_line.values())

    @property
    def float32_by_line(self) -> dict[str, tuple[int, float]]:
        """{line of the model: (count, share of the FLOPs)} of the products in float32, the largest share first."""
        found: dict[str, tuple[int, float]] = {}
        total = self.flops or 1.0  # 0: the arrays are empty
        for p in self.all:
            if p.wide:
                count, share = found.get(p.where, (0, 0.0))
                found[p.where] = count + p.times, share + p.flops / total
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def __str__(self) -> str:
        summary = f"{self.float32} of {self.count} matrix products, {self.float32_share:.1%} of the FLOPs, in float32"
        lines = [f"{share:7.1%} {count:6}  {where}" for where, (count, share) in self.float32_by_line.items()]
        return "\n".join([summary, *lines])


def products(traced: jax.stages.Traced) -> Products:
    """Count the matrix products of a traced step, forward, backward and recomputed, each time that they run.

    A loop of unknown length counts as one pass, and every branch of a condition as taken. The optimizer's products are
    left out, because float32 is deliberate there; so are those of cuDNN's attention, which has half precision alone.

    Args:
      traced: from `TrainStep.trace(batch_shapes)`, or `jax.jit(f).trace(...)` of any function.
    """
    found: list[Product] = []
    cast: dict[str, None] = {}
    _walk(without_dead_code(traced.jaxpr), 1, found, cast)
    return Products(tuple(found), tuple(cast))


def _walk(jaxpr: Any, times: int, found: list[Product], cast: dict[str, None]) -> None:
    for eqn in jaxpr.eqns:
        scope, name = str(eqn.source_info.name_stack), eqn.primitive.name
        if scope.startswith(UPDATE):
            continue
        if AUTO_CAST in scope:
            cast[scope.partition(AUTO_CAST)[2]] = None
        if name in _FLOPS and all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars[:2]):
            found.append(Product(_line(eqn), _is_wide(eqn), times, times * _FLOPS[name](eqn)))
        passes = times * eqn.params["length"] if name == "scan" else times
        for inner in inner_jaxprs(eqn):
            _walk(inner, passes, found, cast)


def _is_wide(eqn: Any) -> bool:
    """Return whether XLA computes a product in float32: in the widest dtype of the operands, unless told otherwise."""
    return eqn.params["precision"] not in _HALF and max(x.aval.dtype.itemsize for x in eqn.invars[:2]) > 2


def _line(eqn: Any) -> str:
    """Return the newest line of the model in the traceback of an operation: "Net.__call__ (net.py:12)"."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = frame.file_name
        if not _is_library(path):
            name = frame.function_name.rpartition("<locals>.")[2]
            return f"{name} ({os.path.basename(path)}:{frame.line_num})"
    return "an unknown line"


def _is_library(path: str) -> bool:
    if path.startswith((_MODELS, *_INSTALLED)):
        return path.startswith(_LIBRARIES) and not path.startswith(_MODELS)
    return path.startswith((*_LIBRARIES, _PYTHON))


def _dot_flops(eqn: Any) -> float:
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    return _multiply_adds(eqn, {*contracted, *batch})


def _ragged_dot_flops(eqn: Any) -> float:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    return _multiply_adds(eqn, {*contracted, *batch, *numbers.rhs_group_dimensions})


def _multiply_adds(eqn: Any, not_free: set[int]) -> float:
    lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
    return 2.0 * prod(lhs) * prod(size for i, size in enumerate(rhs) if i not in not_free)


def _conv_flops(eqn: Any) -> float:
    """Count padding as data, but not the zeros between the elements of a strided convolution's gradient."""
    kernel, out_features = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec[0]
    each = prod(kernel) / kernel[out_features] / prod(eqn.params["lhs_dilation"])
    return 2.0 * prod(eqn.outvars[0].aval.shape) * each


_FLOPS = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _conv_flops,
}
