"""Which dimension of each parameter an axis divides, from a table of regular expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from jzero.errors import ConfigError, some_of
from jzero.mesh import EXPERT
from jzero.model import STACK
from jzero.stored_names import StoredNames, matches
from jzero.tree import PyTree, named

Held = Mapping[str, tuple[int, int]]  # parameter -> (a dimension, into how many parts an axis divides it)


class Division(NamedTuple):
    """The dimensions of parameters that an axis divides.

    Attributes:
      dims: parameter -> the dimension, of one layer's slice if the parameter is in the layer stack.
      unfit: parameter -> the dimension that a table names although the axis does not divide it; None: the table was
        found by trying, and the axis divides no dimension.
    """

    dims: dict[str, int]
    unfit: dict[str, int | None]


def divided_dims(
    params: PyTree,
    table: Mapping[str, int],
    axis: str,
    degree: int,
    *,
    key: str,
    has_stack: bool,
    names: StoredNames | None,
    must_fit: bool = True,
    held: Held = MappingProxyType({}),
) -> Division:
    """Return the dimension of each parameter that a table names.

    Args:
      params: shapes and dtypes.
      table: regular expression (`re.search` in a parameter's name) -> dimension, of one layer's slice if the parameter
        is in the layer stack; negative ones count from the end. The first expression that matches decides.
      axis, degree: the axis of the mesh and its size.
      key: names the table in errors.
      names: the parameters' names without a layer stack, which expressions may match too.
      must_fit: whether a dimension that the axis does not divide is an error; else its parameter is replicated.
      held: what another axis divides; a dimension of both must be a multiple of the product.

    Raises:
      ConfigError: an expression that matches no parameter, a dimension that a parameter does not have, or that the
        axis does not divide (`must_fit`); one that divides none at all.
    """
    shapes = {name: _layer_shape(name, x, has_stack) for name, x in named(params).items()}
    hits = {p: {n for n in shapes if matches(f"{key}: {p!r}", p, n, names)} for p in table}
    if unused := sorted(p for p, of_pattern in hits.items() if not of_pattern):
        raise ConfigError(f"{key}: {unused} match no parameter; the names are {some_of(shapes)}")
    found: dict[str, int] = {}
    unfit: dict[str, tuple[int, str]] = {}  # with the error
    for name, shape in shapes.items():
        pattern = next((p for p, of_pattern in hits.items() if name in of_pattern), None)
        if pattern is not None:
            what = f"{key}[{pattern!r}] = {table[pattern]}"
            dim = _existing(what, name, shape, table[pattern])
            if shape[dim] % (degree * parts_of(held, name, dim)) == 0:
                found[name] = dim
            else:
                unfit[name] = dim, _unfit(what, name, shape, dim, axis, degree, parts_of(held, name, dim))
    if unfit and (must_fit or not found):
        _, error = next(iter(unfit.values()))
        raise ConfigError(error)
    return Division(found, {name: dim for name, (dim, _) in unfit.items()})


def parts_of(held: Held, name: str, dim: int) -> int:
    """Return into how many parts another axis divides a dimension."""
    other, parts = held.get(name, (dim, 1))
    return parts if other == dim else 1


def _layer_shape(name: str, x: Any, has_stack: bool) -> tuple[int, ...]:
    return tuple(jnp.shape(x))[has_stack and bool(re.match(f"{STACK}/", name)) :]


def undividable(params: PyTree, degree: int, has_stack: bool, held: Held) -> dict[str, int | None]:
    """Return the matrices (parameters of two dimensions or more) no dimension of which `degree` divides -> None."""
    shapes = {name: _layer_shape(name, x, has_stack) for name, x in named(params).items()}

    def fits(name: str, shape: tuple[int, ...]) -> bool:
        return any(size % (degree * parts_of(held, name, dim)) == 0 for dim, size in enumerate(shape))

    return {name: None for name, shape in shapes.items() if len(shape) > 1 and not fits(name, shape)}


def _existing(what: str, name: str, shape: tuple[int, ...], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ConfigError(f"{what}: {name} has the dimensions {list(shape)}; choose one of 0 to {len(shape) - 1}")
    return dim % len(shape)


def _unfit(what: str, name: str, shape: tuple[int, ...], dim: int, axis: str, degree: int, others: int) -> str:
    if others > 1:
        return (
            f"{what}: mesh.{EXPERT} = {others} divides the {shape[dim]} of {name} {list(shape)}, and mesh.{axis} = "
            f"{degree} does not divide a part; choose another dimension, or leave the parameter out of the table"
        )
    smaller = gcd(shape[dim], degree)
    if axis == EXPERT:
        fits = f"mesh.{axis} = {smaller}, or " if smaller > 1 else ""
        return (
            f"{what}: mesh.{axis} = {degree} does not divide the {shape[dim]} of {name} {list(shape)}; what fits: "
            f"{fits}a number of experts that is a multiple of {degree}"
        )
    return (
        f"{what}: mesh.{axis} = {degree} does not divide the {shape[dim]} of {name} {list(shape)}; "
        + (f"{smaller} does; or " if smaller > 1 else "")
        + f"leave the parameter out of the table ({axis}_parallel.dimensions replaces a model's own): it is "
        "replicated, and each device computes its whole product"
    )
