"""Finds, by trying, which dimension of each parameter an axis divides: every matrix, so that least is moved.

A model is traced once. What a table moves is read from the moves of a run of the trace on abstract shards, which needs
no device and no compiler. Layers that are alike share their choices, and one layer of a stack stands for all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jzero.config import Config
from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError
from jzero.kernels.trace import ClosedJaxpr
from jzero.mesh import EXPERT, TENSOR
from jzero.model import ENDS, STACK, StackModel, check_model, stack_functions
from jzero.spread.division import NONE_HELD, Held, divide, held_by, layer_shapes, parts_of
from jzero.spread.interpreter import interpret
from jzero.spread.sharded_array import Dims, ModelGroup, ShardedArray, undivided
from jzero.tree import PyTree, named

HELD = 1e-3  # an element that is held weighs this much beside one that is moved
WHOLE_SHARE = 0.005  # the smallest matrices, up to this share of the elements, may stay whole, as adapters do
Choice = int | None


def find_dimensions(model: Any, batch_shapes: PyTree, tensor: int, *, held: Held = NONE_HELD) -> dict[str, int]:
    """Find a table for `tensor_parallel.dimensions` by trying.

    Every matrix is divided along a dimension that `tensor` divides, if there is one; vectors and very small matrices
    are divided where that moves nothing. Of the tables that were tried the one is taken whose forward pass moves the
    fewest elements between the devices. The trials change one parameter at a time, and those of one shape together.

    Args:
      model: as for `make_train_step`.
      batch_shapes: a batch, or its ShapeDtypeStructs.
      tensor: the size of the mesh axis.
      held: parameter -> (the dimension that `expert` divides, into how many parts); both axes together must divide it.

    Returns:
      regular expression of names -> dimension, of one layer's slice for a layer stack.

    Raises:
      ConfigError: no dimension of any parameter that the axis divides.
    """
    check_model(model)
    state = set(getattr(model, "state", ()))
    found: dict[str, Choice] = {}
    for part in _parts(model, batch_shapes):
        fixed = [name in state or not jnp.issubdtype(x.dtype, jnp.floating) for name, x in part.parameters]
        choices = [
            [None] if whole else _choices(x.shape, [tensor * parts_of(held, name, d) for d in range(x.ndim)], small)
            for whole, small, (name, x) in zip(fixed, _small(part.leaves), part.parameters, strict=True)
        ]
        found |= dict(zip(part.names, _least(part, choices, tensor), strict=True))
    table = _table(found)
    if not table:
        raise ConfigError(f"find_dimensions: tensor = {tensor} divides no dimension of a parameter of {model!r}")
    return table


def with_found_dimensions(config: Config, model: Any, mesh: Mesh, params: PyTree, has_stack: bool) -> Config:
    """Write a table into the config that has none, for a model that has none, by trying (`find_dimensions`).

    A model with an `example_batch` can be tried; others stay as they are.
    """
    example, degree = getattr(model, "example_batch", None), mesh.shape[TENSOR]
    known = config.tensor_parallel.dimensions or getattr(model, "divided", {}).get(TENSOR)
    if degree == 1 or known or example is None:
        return config
    with slow_work(f"trying how to divide the parameters by {degree}"):
        experts = divide(EXPERT, model, layer_shapes(params, has_stack), config, mesh)
        table = find_dimensions(model, example, degree, held=held_by(experts, mesh))
    section = config.tensor_parallel.model_copy(update={"dimensions": table})
    return config.model_copy(update={"tensor_parallel": section})


class _Part(NamedTuple):
    """A function of some parameters, traced.

    Attributes:
      names, leaves: of the parameters, with their shapes; of one layer of a stack.
      closed: its jaxpr; the parameters come first.
      rest: the shapes of the other operands, and whether each lies as activations do between layers.
    """

    names: list[str]
    leaves: list[jax.ShapeDtypeStruct]
    closed: ClosedJaxpr
    rest: list[tuple[jax.ShapeDtypeStruct, bool]]

    @property
    def parameters(self) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
        return zip(self.names, self.leaves, strict=True)


def _parts(model: Any, batch: PyTree) -> Iterator[_Part]:
    batch = jax.eval_shape(lambda x: x, batch)
    key = jax.random.key(0)  # as in training: some models draw in any case
    params = jax.eval_shape(model.init, key)
    if not isinstance(model, StackModel):
        yield _trace(lambda weights, batch, _: model.loss(weights, batch, key), "", params, batch, ())
        return
    prefix, block, suffix = stack_functions(model)
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params[STACK])
    x = jax.eval_shape(lambda ends, batch: prefix(ends, batch, key)[0], params[ENDS], batch)

    def both_ends(ends: PyTree, batch: PyTree, x: PyTree) -> PyTree:
        return prefix(ends, batch, key)[0], suffix(ends, x, batch, key)[0]

    yield _trace(both_ends, f"{ENDS}/", params[ENDS], batch, x)
    yield _trace(lambda weights, _, x: block(weights, x, key)[0], f"{STACK}/", layer, (), x)


def _trace(f: Callable, prefix: str, weights: PyTree, batch: PyTree, x: PyTree) -> _Part:
    closed, table = jax.make_jaxpr(f)(weights, batch, x), named(weights)
    rest = [*((v, False) for v in jax.tree.leaves(batch)), *((v, True) for v in jax.tree.leaves(x))]
    return _Part([prefix + name for name in table], list(table.values()), closed, rest)


def _small(leaves: Sequence[jax.ShapeDtypeStruct]) -> list[bool]:
    """Tell which leaves may stay whole: vectors, and the smallest of the others."""
    sizes = sorted(prod(x.shape) for x in leaves)
    totals = zip(sizes, accumulate(sizes), strict=True)
    largest = max((size for size, total in totals if total <= WHOLE_SHARE * sum(sizes)), default=0)
    return [len(x.shape) < 2 or prod(x.shape) <= largest for x in leaves]


def _choices(shape: Sequence[int], parts: Sequence[int], small: bool) -> list[Choice]:
    fits: list[Choice] = [d for d, size in enumerate(shape) if size % parts[d] == 0]
    return fits + [None] * small or [None]


def _least(part: _Part, choices: Sequence[Sequence[Choice]], degree: int) -> list[Choice]:
    """Return the choice for each parameter, by coordinate descent from all first and from all last dimensions."""
    best: tuple[float, list[Choice]] = (float("inf"), [])
    for start in (0, -1):
        plan = [options[start] for options in choices]
        least, before = _cost(part, plan, degree), float("inf")
        while least < before:
            before = least
            for together in _together(part, choices):
                for d in choices[together[0]]:
                    tried = [d if i in together else at for i, at in enumerate(plan)]
                    if tried != plan and (cost := _cost(part, tried, degree)) < least:
                        plan, least = tried, cost
        best = min(best, (least, plan), key=lambda pair: pair[0])
    return best[1]


def _together(part: _Part, choices: Sequence[Sequence[Choice]]) -> list[list[int]]:
    """List the parameters that change together: those of one shape, as queries and keys, and those of one name.

    State, which stays whole, does not change with parameters of its shape.
    """
    shapes, names = defaultdict[Any, list[int]](list), defaultdict[Any, list[int]](list)
    for i, (name, x) in enumerate(part.parameters):
        alike = x.shape, tuple(choices[i])
        shapes[alike].append(i)
        names[_pattern(name), alike].append(i)
    return list(map(list, dict.fromkeys(map(tuple, chain(shapes.values(), names.values())))))


def _cost(part: _Part, plan: Sequence[Choice], degree: int) -> float:
    """Count the elements that are moved if the parameters are divided like this, and a little of what is held."""
    group = ModelGroup({TENSOR: degree}, {1: (TENSOR,)})
    shapes = [*part.leaves, *(x for x, _ in part.rest)]
    dims: list[Dims] = [
        tuple((TENSOR,) if d == at else () for d in range(len(x.shape)))
        for x, at in zip(part.leaves, plan, strict=True)
    ]
    dims += [group.activation_dims(x.shape) if rests else undivided(len(x.shape)) for x, rests in part.rest]

    def run(*xs: jax.Array) -> tuple[()]:
        values = [
            ShardedArray(x, whole.shape, lies, weight=i < len(part.leaves))
            for i, (x, whole, lies) in enumerate(zip(xs, shapes, dims, strict=True))
        ]
        for v in interpret(group, part.closed, values):
            group.in_activation_layout(v)
        return ()

    specs = tuple(PartitionSpec(*(axes or None for axes in lies)) for lies in dims)
    mesh = AbstractMesh((degree,), (TENSOR,), axis_types=(AxisType.Auto,))  # jax 0.11's default is Explicit
    jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(), check_vma=False), *shapes)
    moved = sum(prod(move.shape) * (2 if move.kind == "all-reduce" else 1) for move in group.traced.moves)
    held = sum(prod(group.local(x.shape, lies)) for x, lies in zip(part.leaves, dims, strict=False))
    return moved + HELD * held


def _pattern(name: str) -> str:
    """Return a regular expression of the names that differ from this one in their first number: of other layers."""
    before, number, after = re.match(r"(\D*)(\d*)(.*)", name).groups()  # type: ignore[union-attr]
    any_number = r"\d+" if number else ""
    return f"^{re.escape(before)}{any_number}{re.escape(after)}$"


def _table(found: dict[str, Choice]) -> dict[str, int]:
    """Merge the names of layers that agree into regular expressions, and leave out what is whole."""
    table: dict[str, int] = {}
    for name, d in found.items():
        alike = _pattern(name)
        agree = all(other == d for key, other in found.items() if re.search(alike, key))
        if d is not None:
            table[alike if agree else f"^{re.escape(name)}$"] = d
    return table
