"""What a mesh whose devices act as one cannot do yet, and the tables that `expert` and `tensor` need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from jax.sharding import Mesh

from jzero.config import Config
from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError, some_of
from jzero.mesh import CONTEXT, EXPERT, GROUP_AXES, PIPE, TENSOR, degrees_text, group_size, present
from jzero.optimizers import compresses
from jzero.spread.division import Division, Held, divided_dims, undividable
from jzero.spread.search import find_dimensions
from jzero.tree import PyTree, named


def divided(
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
    experts = _division(EXPERT, model, params, config, mesh, has_stack)
    tensor = _division(TENSOR, model, params, config, mesh, has_stack, experts)
    if searched:
        unfit = undividable(params, mesh.shape[TENSOR], has_stack, _held(experts, mesh))
        tensor = tensor._replace(unfit=unfit)
    return {EXPERT: experts, TENSOR: tensor}


def _division(
    axis: str, model: Any, params: PyTree, config: Config, mesh: Mesh, has_stack: bool, experts: Division | None = None
) -> Division:
    """Return what an axis divides; `experts`: what `expert` divides already."""
    own, key = getattr(config, f"{axis}_parallel").dimensions, f"{axis}_parallel.dimensions"
    if axis == TENSOR and config.tensor_parallel.partition_config.layer_specs:
        key = "tensor_parallel.partition_config"
    table = _table(model, own, axis, mesh.shape[axis], params, key)
    key = key if own else f"the model's divided[{axis!r}]"
    division = divided_dims(
        params, table, axis, mesh.shape[axis], key=key, has_stack=has_stack, names=getattr(model, "names", None),
        must_fit=bool(own) or axis != TENSOR, held=_held(experts, mesh) if experts else {},
    )  # fmt: skip
    if of_state := sorted(set(division.dims) & set(getattr(model, "state", ()))):
        raise ConfigError(f"{key}: {of_state} are state, which is whole on every device; write a table without them")
    return division


def _held(experts: Division, mesh: Mesh) -> Held:
    return {name: (dim, mesh.shape[EXPERT]) for name, dim in experts.dims.items()}


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


_EXAMPLES = {
    EXPERT: '{"regular expression": 0} for the weights that jzero.experts takes, or give the model `divided`',
    TENSOR: '{"up/kernel": 1, "down/kernel": 0}, or pass example_batch to jzero.from_flax, so that jzero finds one',
}


def _table(model: Any, own: Mapping[str, int], axis: str, degree: int, params: PyTree, key: str) -> Mapping[str, int]:
    if degree == 1:
        if own:
            raise ConfigError(f"{key}: does nothing on a mesh with {axis} 1; set mesh.{axis}, or leave it out")
        return {}
    if table := own or getattr(model, "divided", {}).get(axis, {}):
        return table
    raise ConfigError(
        f"mesh.{axis} = {degree}: no table says which dimensions of the parameters it divides; write {key} = "
        f"{_EXAMPLES[axis]}; the names are {some_of(named(params))}"
    )


def with_found_dimensions(config: Config, model: Any, mesh: Mesh, params: PyTree, has_stack: bool) -> Config:
    """Write a table into the config that has none, for a model that has none, by trying (`find_dimensions`).

    A model with an `example_batch` can be tried; others stay as they are.
    """
    example, degree = getattr(model, "example_batch", None), mesh.shape[TENSOR]
    known = config.tensor_parallel.dimensions or getattr(model, "divided", {}).get(TENSOR)
    if degree == 1 or known or example is None:
        return config
    with slow_work(f"trying how to divide the parameters by {degree}"):
        experts = _division(EXPERT, model, params, config, mesh, has_stack)
        table = find_dimensions(model, example, degree, held=_held(experts, mesh))
    section = config.tensor_parallel.model_copy(update={"dimensions": table})
    return config.model_copy(update={"tensor_parallel": section})


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
    if config.optimizer and compresses(config.optimizer):
        yield (
            f"optimizer.type {config.optimizer.type!r}: its compressed communication needs {keys} 1; or write "
            "optimizer.params.exact_communication: true"
        )
