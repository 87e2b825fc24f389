"""Which dimension of each parameter an axis divides, from a table of regular expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from typing import Any

import jax.numpy as jnp

from jzero.errors import ConfigError, some_of
from jzero.model import STACK
from jzero.stored_names import StoredNames, matches
from jzero.tree import PyTree, named


def divided_dims(
    params: PyTree,
    table: Mapping[str, int],
    axis: str,
    degree: int,
    *,
    key: str,
    has_stack: bool,
    names: StoredNames | None,
) -> dict[str, int]:
    """Return the dimension of each parameter that a table names.

    Args:
      params: shapes and dtypes.
      table: regular expression (`re.search` in a parameter's name) -> dimension, of one layer's slice if the parameter
        is in the layer stack; negative ones count from the end. The first expression that matches decides.
      axis, degree: the axis of the mesh and its size.
      key: names the table in errors.
      names: the parameters' names without a layer stack, which expressions may match too.

    Raises:
      ConfigError: an expression that matches no parameter, a dimension that a parameter does not have, or that the
        axis does not divide.
    """
    shapes = {name: _layer_shape(name, x, has_stack) for name, x in named(params).items()}
    hits = {p: {n for n in shapes if matches(f"{key}: {p!r}", p, n, names)} for p in table}
    if unused := sorted(p for p, found in hits.items() if not found):
        raise ConfigError(f"{key}: {unused} match no parameter; the names are {some_of(shapes)}")
    dims = {}
    for name, shape in shapes.items():
        pattern = next((p for p, found in hits.items() if name in found), None)
        if pattern is not None:
            dims[name] = _checked(f"{key}[{pattern!r}] = {table[pattern]}", name, shape, table[pattern], axis, degree)
    return dims


def _layer_shape(name: str, x: Any, has_stack: bool) -> tuple[int, ...]:
    return tuple(jnp.shape(x))[has_stack and bool(re.match(f"{STACK}/", name)) :]


def _checked(what: str, name: str, shape: tuple[int, ...], dim: int, axis: str, degree: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ConfigError(f"{what}: {name} has the dimensions {list(shape)}; choose one of 0 to {len(shape) - 1}")
    if shape[dim] % degree:
        smaller = gcd(shape[dim], degree)
        raise ConfigError(
            f"{what}: mesh.{axis} = {degree} does not divide the {shape[dim]} of {name} {list(shape)}; "
            + (f"{smaller} does; or " if smaller > 1 else "")
            + f"leave the parameter out of the table ({axis}_parallel.dimensions replaces a model's own): it is "
            "replicated, and each device computes its whole product"
        )
    return dim % len(shape)
