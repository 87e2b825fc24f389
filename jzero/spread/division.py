"""Which dimension of each parameter `expert` and `tensor` divide, from tables of regular expressions.

A table is the config's, the model's, or made of DeepSpeed's `layer_specs`. PyTorch's weight is [out, in], JAX's
[in, out]: "column" there divides the last dimension of a matrix, "row" the first one. What a mesh whose devices act as
one cannot do yet is an error here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jzero.config import Config
from jzero.errors import ConfigError, some_of
from jzero.mesh import CONTEXT, EXPERT, GROUP_AXES, PIPE, TENSOR, degrees_text, group_size, present
from jzero.model import STACK
from jzero.stored_names import StoredNames, matches
from jzero.tree import PyTree, named

Shapes = Mapping[str, tuple[int, ...]]  # parameter -> its shape, of one layer's slice if it is in the layer stack
Held = Mapping[str, tuple[int, int]]  # parameter -> (a dimension, into how many parts an axis divides it)
NONE_HELD: Held = MappingProxyType({})


class Division(NamedTuple):
    """The dimensions of parameters that an axis divides.

    Attributes:
      dims: parameter -> the dimension, of one layer's slice if the parameter is in the layer stack.
      unfit: parameter -> the dimension that a table names although the axis does not divide it; None: the table was
        found by trying, and the axis divides no dimension.
    """

    dims: dict[str, int]
    unfit: dict[str, int | None]


class Table(NamedTuple):
    """A table of the dimensions that an axis divides.

    Attributes:
      dims: regular expression (`re.search` in a parameter's name) -> dimension, of one layer's slice if the parameter
        is in the layer stack; negative ones count from the end. The first expression that matches decides.
      key: names the table in errors.
      must_fit: whether a dimension that the axis does not divide is an error; else its parameter is replicated.
    """

    dims: Mapping[str, int]
    key: str
    must_fit: bool = True


def divisions_by_axis(
    model: Any, params: PyTree, config: Config, mesh: Mesh, has_stack: bool, searched: bool = False
) -> dict[str, Division]:
    """Return axis -> the dimensions that the axis divides: by the config's table, else by the model's.

    A dimension of a model's table that `tensor` does not divide, as a vocabulary of 50,257, is left whole. It is an
    error in a config's table, and for `expert`: experts that are whole on every device are no expert parallelism.

    Args:
      searched: whether the config's table for `tensor` was found by trying.

    Raises:
      ConfigError: no table or one that does not fit, a table without the axis, what does not work with the axes yet.
    """
    if group_size(mesh) > 1:
        axes = present(mesh, *GROUP_AXES)
        keys = " and ".join(f"mesh.{axis}" for axis in axes)
        if problems := [f"{degrees_text(mesh, axes)} with {what}" for what in _not_yet(config, mesh, keys)]:
            raise ConfigError(*problems)
    shapes = layer_shapes(params, has_stack)
    experts = divide(EXPERT, model, shapes, config, mesh)
    held = held_by(experts, mesh)
    tensor = divide(TENSOR, model, shapes, config, mesh, held)
    if searched:
        tensor = tensor._replace(unfit=_undividable(shapes, mesh.shape[TENSOR], held))
    return {EXPERT: experts, TENSOR: tensor}


_EXAMPLES = {
    EXPERT: '{"regular expression": 0} for the weights that jzero.experts takes, or give the model `divided`',
    TENSOR: '{"up/kernel": 1, "down/kernel": 0}, or pass example_batch to jzero.from_flax, so that jzero finds one',
}


def divide(axis: str, model: Any, shapes: Shapes, config: Config, mesh: Mesh, held: Held = NONE_HELD) -> Division:
    """Return what an axis divides; `held`: what another one divides already."""
    degree, own = mesh.shape[axis], getattr(config, f"{axis}_parallel").dimensions
    of_specs = axis == TENSOR and config.tensor_parallel.partition_config.layer_specs
    key = "tensor_parallel.partition_config" if of_specs else f"{axis}_parallel.dimensions"
    if degree == 1:
        if own:
            raise ConfigError(f"{key}: does nothing on a mesh with {axis} 1; set mesh.{axis}, or leave it out")
        return Division({}, {})
    table = own or getattr(model, "divided", {}).get(axis, {})
    if not table:
        raise ConfigError(
            f"mesh.{axis} = {degree}: no table says which dimensions of the parameters it divides; write {key} = "
            f"{_EXAMPLES[axis]}; the names are {some_of(shapes)}"
        )
    key = key if own else f"the model's divided[{axis!r}]"
    must_fit = bool(own) or axis != TENSOR
    division = divided_dims(shapes, Table(table, key, must_fit), axis, degree, getattr(model, "names", None), held)
    if of_state := sorted(set(division.dims) & set(getattr(model, "state", ()))):
        raise ConfigError(f"{key}: {of_state} are state, which is whole on every device; write a table without them")
    return division


def held_by(experts: Division, mesh: Mesh) -> Held:
    return {name: (dim, mesh.shape[EXPERT]) for name, dim in experts.dims.items()}


def divided_dims(
    shapes: Shapes, table: Table, axis: str, degree: int, names: StoredNames | None = None, held: Held = NONE_HELD
) -> Division:
    """Return the dimension of each parameter that a table names.

    Args:
      axis, degree: the axis of the mesh and its size.
      names: the parameters' names without a layer stack, which expressions may match too.
      held: what another axis divides; a dimension of both must be a multiple of the product.

    Raises:
      ConfigError: an expression that matches no parameter, a dimension that a parameter does not have, or that the
        axis does not divide (`must_fit`); one that divides none at all.
    """
    dims, key, must_fit = table
    hits = {p: {n for n in shapes if matches(f"{key}: {p!r}", p, n, names)} for p in dims}
    if unused := sorted(p for p, of_pattern in hits.items() if not of_pattern):
        raise ConfigError(f"{key}: {unused} match no parameter; the names are {some_of(shapes)}")
    found: dict[str, int] = {}
    unfit: dict[str, int | None] = {}
    errors = []
    for name, shape in shapes.items():
        pattern = next((p for p, of_pattern in hits.items() if name in of_pattern), None)
        if pattern is None:
            continue
        what = f"{key}[{pattern!r}] = {dims[pattern]}"
        if not -len(shape) <= dims[pattern] < len(shape):
            raise ConfigError(f"{what}: {name} has the dimensions {list(shape)}; choose one of 0 to {len(shape) - 1}")
        dim = dims[pattern] % len(shape)
        others = parts_of(held, name, dim)
        if shape[dim] % (degree * others) == 0:
            found[name] = dim
        else:
            unfit[name] = dim
            errors.append(_unfit(f"{name} {list(shape)}", what, shape[dim], axis, degree, others))
    if errors and (must_fit or not found):
        raise ConfigError(errors[0])
    return Division(found, unfit)


def parts_of(held: Held, name: str, dim: int) -> int:
    """Return into how many parts another axis divides a dimension."""
    other, parts = held.get(name, (dim, 1))
    return parts if other == dim else 1


def layer_shapes(params: PyTree, has_stack: bool) -> Shapes:
    return {
        name: tuple(jnp.shape(x))[has_stack and name.startswith(f"{STACK}/") :] for name, x in named(params).items()
    }


def _undividable(shapes: Shapes, degree: int, held: Held) -> dict[str, int | None]:
    """Return the matrices (parameters of two dimensions or more) no dimension of which `degree` divides -> None."""

    def fits(name: str, shape: tuple[int, ...]) -> bool:
        return any(size % (degree * parts_of(held, name, dim)) == 0 for dim, size in enumerate(shape))

    return {name: None for name, shape in shapes.items() if len(shape) > 1 and not fits(name, shape)}


def _unfit(parameter: str, what: str, size: int, axis: str, degree: int, others: int) -> str:
    """Describe a dimension that an axis does not divide, with what fits."""
    if others > 1:
        return (
            f"{what}: mesh.{EXPERT} = {others} divides the {size} of {parameter}, and mesh.{axis} = "
            f"{degree} does not divide a part; choose another dimension, or leave the parameter out of the table"
        )
    smaller = gcd(size, degree)
    if axis == EXPERT:
        fits = f"mesh.{axis} = {smaller}, or " if smaller > 1 else ""
        return (
            f"{what}: mesh.{axis} = {degree} does not divide the {size} of {parameter}; what fits: "
            f"{fits}a number of experts that is a multiple of {degree}"
        )
    return (
        f"{what}: mesh.{axis} = {degree} does not divide the {size} of {parameter}; "
        + (f"{smaller} does; or " if smaller > 1 else "")
        + f"leave the parameter out of the table ({axis}_parallel.dimensions replaces a model's own): it is "
        "replicated, and each device computes its whole matmul"
    )


def check_tables(model: Any) -> None:
    """Raise a ConfigError unless `divided` of a model, if it has one, is {axis: {regular expression: dimension}}."""
    tables = getattr(model, "divided", {})
    if not isinstance(tables, Mapping):
        raise ConfigError(f"the model's divided = {tables!r}: must be {{axis: {{regular expression: dimension}}}}")
    for axis, table in tables.items():
        what = f"the model's divided[{axis!r}]"
        if axis not in (EXPERT, TENSOR):
            raise ConfigError(f'{what}: no such axis; choose "{EXPERT}" or "{TENSOR}"')
        if not isinstance(table, Mapping) or not all(isinstance(dim, Integral) for dim in table.values()):
            raise ConfigError(f"{what} = {table!r}: must be {{regular expression: dimension}}")


def _not_yet(config: Config, mesh: Mesh, keys: str) -> Iterator[str]:
    """Describe what the config asks for and the axes with these keys do not work with yet, each with the fix."""
    zero = config.zero_optimization
    if axes := present(mesh, EXPERT, CONTEXT):  # their devices are among those that ZeRO partitions over
        or_one = f"not yet supported; remove it, or set {' and '.join(f'mesh.{axis}' for axis in axes)} to 1"
        if zero.zero_quantized_gradients:
            yield f"zero_optimization.zero_quantized_gradients = true: {or_one}"
        if zero.zero_hpz_partition_size > 1:
            yield f"zero_optimization.zero_hpz_partition_size = {zero.zero_hpz_partition_size}: {or_one}"
    if config.tensor_parallel.regather and mesh.shape[PIPE] > 1:
        yield (
            f"tensor_parallel.regather = true and mesh.pipe = {mesh.shape[PIPE]}: not yet supported; leave it out, or "
            'write activation_checkpointing.policy "matmuls", which gathers again too'
        )


# ------------------------------------------------------------------ DeepSpeed's `layer_specs`

_KEY = "tensor_parallel.partition_config"
_BY_HAND = "write tensor_parallel.dimensions instead, with the dimension of the model's own shape"


def with_layer_specs(config: Config, model: Any, params: PyTree, has_stack: bool) -> Config:
    """Write the table `tensor_parallel.dimensions` of the config's `layer_specs` into the config.

    With `use_default_specs` the model's own table decides about the parameters that no spec matches. A bias is divided
    with its column-parallel weight.

    Raises:
      ConfigError: a spec that matches no weight or only some layers, or means no dimension of a weight.
    """
    section = config.tensor_parallel
    if not (specs := section.partition_config.layer_specs):
        return config
    names, shapes = getattr(model, "names", None), layer_shapes(params, has_stack)
    weights = {name: shape for name, shape in shapes.items() if len(shape) > 1 and not name.endswith("/bias")}
    chosen: dict[str, int | None] = {}
    for i, spec in enumerate(specs):
        what = f"{_KEY}.layer_specs[{i}]"
        hits = [name for name in weights if _matches(what, spec["patterns"], name, names)]
        if not hits:
            written = {torch_name(part): None for name in weights for part in _aliases(name, names)}
            raise ConfigError(
                f"{what}.patterns = {list(spec['patterns'])}: match no weight; by PyTorch's rules their names are "
                f"{some_of(written)}"
            )
        for name in hits:
            if name not in chosen:
                chosen |= _of_weight(what, spec, name, shapes)
    if section.partition_config.use_default_specs:
        own = getattr(model, "divided", {}).get(TENSOR, {})
        for name in [name for name in shapes if name not in chosen]:
            fitting = (dim for p, dim in own.items() if matches(f"divided: {p!r}", p, name, names))
            if (found := next(fitting, None)) is not None:
                chosen[name] = found
    table = {f"^{re.escape(name)}$": dim for name, dim in chosen.items() if dim is not None}
    if not table:
        raise ConfigError(f"{_KEY}.layer_specs: every spec skips its weights, so nothing is divided; add a column")
    return config.model_copy(update={"tensor_parallel": section.model_copy(update={"dimensions": table})})


def _aliases(name: str, names: StoredNames | None) -> tuple[str, ...]:
    return (name, *(names.known[name] if names else ()))


def _matches(what: str, patterns: Sequence[str], name: str, names: StoredNames | None) -> bool:
    """Return whether a pattern matches the beginning of one of the names, as PyTorch or the model writes them."""
    own, *parts = _aliases(name, names)
    for written in (torch_name, lambda part: part.replace("/", ".")):
        known = StoredNames(((written(own), tuple(map(written, parts))),))
        if any(matches(f"{what}: {p!r}", _from_the_start(p), written(own), known) for p in patterns):
            return True
    return False


def _from_the_start(pattern: str) -> str:
    """Anchor an expression at the start, after flags for all of it: DeepSpeed uses re.match."""
    flags = found.group() if (found := re.match(r"\(\?[aimsux]+\)", pattern)) else ""
    return rf"{flags}\A(?:{pattern.removeprefix(flags)})"


def _of_weight(
    what: str, spec: Mapping[str, Any], name: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int | None]:
    """Return the dimension of a weight, and of its bias if that is divided with it; None: whole."""
    if spec["partition_type"] == "skip":
        return {name: None}
    dim = _dimension(what, spec, name, shapes[name])
    bias = f"{name.rpartition('/')[0]}/bias".lstrip("/")
    with_bias = dim == len(shapes[name]) - 1 and len(shapes.get(bias, ())) > 0
    return {name: dim, **({bias: len(shapes[bias]) - 1} if with_bias else {})}


def _dimension(what: str, spec: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> int:
    """Return the dimension of a weight [in, out], [in, parts, out] or [experts, in, out] that a spec divides."""
    kind, seen, asked = spec["partition_type"], spec["shape"], spec["partition_dim"]
    dim = asked if asked is not None else 0 if kind == "column" else 1  # of PyTorch's [out, in], or of `seen`
    text = f"{what} for {name} {list(shape)}: partition_type {kind!r}"
    text += f", shape {[list(n) if isinstance(n, tuple) else n for n in seen]}" if seen else ""
    text += f", partition_dim {asked}" if asked is not None else ""
    if dim >= len(seen or shape):
        count = len(seen or shape)
        raise ConfigError(f"{text}: there are {count} dimensions; choose one of 0 to {count - 1}")
    if len(shape) == 2 and (seen is None or (len(seen) == 2 and dim == 0 and seen[0] == -1)):
        return 1 - dim
    if seen and len(shape) == 3:
        if len(seen) == 3 and seen[0] == shape[0]:
            return (0, 2, 1)[dim]
        if len(seen) == 2 and dim == 0 and seen[0] == shape[1]:
            return 2
    if len(shape) > 2 and not any(isinstance(n, tuple) for n in seen or ()):
        raise ConfigError(f"{text}: unclear for a weight of {len(shape)} dimensions; {_with_shape(shape)}{_BY_HAND}")
    raise ConfigError(
        f"{text}: an equal cut of it would separate what belongs together; give what is side by side in the weight a "
        f"dimension of its own, as [in, {seen[0] if isinstance(seen[0], int) else 'parts'}, out], or {_BY_HAND}"
    )


def _with_shape(shape: tuple[int, ...]) -> str:
    """Word how a spec names each dimension of a weight, such as an attention's query kernel [in, heads, size]."""
    if len(shape) != 3:
        return '"shape" has 2 or 3 sizes; '
    first, middle, last = shape
    return (
        f'write "shape": {[first, last, middle]} (PyTorch\'s order) and "partition_dim": 0, 2 or 1 for dimension 0, 1 '
        f"or 2 of {list(shape)}; or "
    )


def torch_name(name: str) -> str:
    """Write a parameter's name as PyTorch would.

    >>> torch_name("layers/0/up/kernel"), torch_name("embed/embedding"), torch_name("out/bias")
    ('layers.0.up.weight', 'embed.weight', 'out.bias')
    """
    return re.sub(r"/(kernel|embedding|scale)$", "/weight", name).replace("/", ".")
