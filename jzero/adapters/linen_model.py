"""Linen modules as models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import meta

from jzero.adapters.constants import Constants, same
from jzero.adapters.methods import ModuleModel, Outcome, copy_description
from jzero.adapters.nnx_model import MASKED
from jzero.errors import ConfigError
from jzero.layout.replicas import axis_exists, replica_axes
from jzero.mesh import AXES
from jzero.tree import PyTree, named

PARAMS, STATISTICS = "params", "batch_stats"
BATCH_NORM = {"axis_name", "use_running_average"}  # the fields that make a module one


class LinenModel(ModuleModel):
    """A Linen module and a loss function as a model.

    Args:
      module: the module, not bound.
      loss_fn: `loss_fn(bound module, batch, rng)`.
      example: a batch, or its ShapeDtypeStructs; `init` calls the loss on zeros of these shapes.
      example_extra: the same for what the loss takes besides the batch; None: nothing.
      has_aux: whether the loss function returns metrics too.
      sync_batch_norm: whether BatchNorm's statistics in training are those of all replicas.

    The parameters of a module with state are its "params" collection, with each collection of state beside it under its
    own name.
    """

    def __init__(
        self, module: linen.Module, loss_fn: Callable, example: PyTree, has_aux: bool = False,
        sync_batch_norm: bool = True, example_extra: PyTree = None,
    ):  # fmt: skip
        _hide_step_from_flax()
        self.name, self.linen, self.loss_fn, self.has_aux = type(module).__name__, module, loss_fn, has_aux
        self.sync_batch_norm, self.example, self.example_extra = sync_batch_norm, example, example_extra
        shapes = jax.eval_shape(lambda: self._variables(jax.random.key(0)))
        self.collections, self.mutable, self.state = self._find_collections(shapes)
        self._names = named(self._params(shapes)).keys()
        self.constants = Constants(self._make_constants)
        copy_description(self, module)

    def module(self, params: PyTree, rng: jax.Array | None = None) -> Any:
        variables = dict(self.constants.values) if self.collections else {}
        params = dict(params)
        variables |= {name: params.pop(name) for name in self.mutable}
        return self.linen.bind({PARAMS: params, **variables}, rngs=streams(rng), mutable=self.mutable or False)

    def init(self, rng: jax.Array) -> PyTree:
        return self._params(self._variables(rng))

    def adopt(self, values: PyTree) -> PyTree:
        """Convert Linen variables, sown ones too, to the model's parameters; leave parameters as they are."""
        if PARAMS not in values or named(values).keys() == self._names:
            return values
        values = meta.unbox(values)
        for name in set(values) & set(self.collections):
            own = named(self.constants.values[name])
            arrays = {leaf: x for leaf, x in named(values[name]).items() if isinstance(x, np.ndarray | jax.Array)}
            for leaf, x in arrays.items():
                if leaf not in own or x.shape != own[leaf].shape or not same(x, own[leaf]):
                    raise ConfigError(
                        f"params: {name}/{leaf} is not what the module computes: training does not change it, so it "
                        "is a constant of the module; make it a parameter and name it in frozen_parameters"
                    )
        return self._params(values)

    def _params(self, variables: PyTree) -> PyTree:
        return {**variables.get(PARAMS, {}), **{name: variables.get(name, {}) for name in self.mutable}}

    def run(self, params: PyTree, rng: jax.Array | None, f: Callable[[Any], PyTree]) -> Outcome:
        module = self.module(params, rng)
        with self.batch_norm(training=rng is not None):
            result = f(module)
        return result, {name: module.variables[name] for name in self.mutable}

    def _variables(self, rng: jax.Array) -> dict[str, Any]:
        """Initialise all collections, without metadata boxes."""
        init = linen.init(lambda module: self._loss_of_zeros(module, None), self.linen)
        return meta.map_axis_meta(_unbox, init({PARAMS: rng}))

    def _loss_of_zeros(self, module: Any, rng: Any) -> Any:
        """Call the loss on the examples' shapes."""
        batch, extra = (jax.tree.map(jnp.zeros_like, x) for x in (self.example, self.example_extra))
        return self.loss_fn(module, batch, rng, **({} if extra is None else {"extra": extra}))

    def _make_constants(self) -> dict[str, Any]:
        variables = self._variables(jax.random.key(0))
        return {name: variables[name] for name in self.collections}

    def batch_norm(self, training: bool) -> AbstractContextManager:
        return linen.intercept_methods(functools.partial(_set_axes, sync=training and self.sync_batch_norm))

    def _find_collections(self, shapes: PyTree) -> tuple[list[str], list[str], frozenset[str]]:
        """Sort the collections besides the parameters into constants, state and sown values, which are ignored.

        Linen does not mark them, so the loss is traced. A collection that training does not change is constant, unless
        it has the statistics of BatchNorm: a frozen one reads those of another run. Of the others, the loss needs
        those that it reads: without one of them it fails.

        Args:
          shapes: of all variables.

        Returns:
          The constant collections, the collections of state, and the names of the state's leaves.
        """
        names = sorted(set(shapes) - {PARAMS})
        changed: set[str] = set()

        def train(variables: PyTree, mutable: list[str]) -> Any:
            key = jax.random.key(0)
            apply = linen.apply(lambda module: self._loss_of_zeros(module, key), self.linen, mutable=mutable)
            with self.batch_norm(training=True):
                return apply(variables, rngs=streams(key))

        def find_changed(variables: PyTree) -> None:
            _, after = train(variables, names)
            # An unchanged variable comes back as the same tracer.
            changed.update(name for name in names if _ids(after.get(name)) != _ids(variables[name]))

        def needed(name: str) -> bool:
            others = {other: variables for other, variables in shapes.items() if other != name}
            try:
                jax.eval_shape(lambda variables: train(variables, sorted(others.keys() - {PARAMS})), others)
            except flax.errors.FlaxError:
                return True
            return False

        if names:
            jax.eval_shape(find_changed, shapes)
        changed |= {STATISTICS} & set(names)
        state = [name for name in names if name in changed and needed(name)]
        if twice := sorted(set(state) & set(shapes.get(PARAMS, {}))):
            raise ConfigError(f"from_flax: {twice} names both a submodule and a variable collection: rename one")
        constants = [name for name in names if name not in changed]
        return constants, state, frozenset(named({name: shapes[name] for name in state}))


def _set_axes(next_method: Callable, args: Any, kwargs: Any, context: Any, *, sync: bool) -> Any:
    """Set the axes over which BatchNorm averages, while a method of a Linen module is called.

    Copies of Flax's BatchNorm count too. A model written for `jax.pmap` names an axis that does not exist here: the
    replicas take its place. The axis of a `vmap` around the layer stays.
    """
    module = context.module
    if module.__dataclass_fields__.keys() >= BATCH_NORM and not module.is_initializing():
        replicas = replica_axes() if sync else ()
        if kwargs.get("mask") is not None and replicas:
            raise ConfigError(MASKED)
        own = (module.axis_name,) if isinstance(module.axis_name, str) else module.axis_name or ()
        axes = dict.fromkeys((*filter(axis_exists, own), *replicas))  # without repetitions
        object.__setattr__(module, "axis_name", tuple(axes) or None)  # modules are frozen
    return next_method(*args, **kwargs)


def streams(rng: jax.Array | None) -> dict[str, jax.Array] | None:
    """Return the keys for `make_rng`: "dropout", and "params", Linen's default for all other streams."""
    return None if rng is None else {"dropout": rng, PARAMS: jax.random.fold_in(rng, 1)}


@functools.cache
def _hide_step_from_flax() -> None:
    """Make Flax see no mesh inside the train step, whose parameters jzero shards.

    Where Flax sees a mesh, it applies the shardings of `with_partitioning` and `with_logical_constraint`. In the step
    JAX refuses their axes, which are manual or not the mesh's. `_unbox` does not reach the initializers that
    `DenseGeneral` traces in every call.
    """
    find = meta.get_global_mesh

    def find_outside() -> Any:
        mesh = find()
        return None if mesh is not None and mesh.axis_names == AXES and mesh.manual_axes else mesh

    meta.get_global_mesh = find_outside


def _unbox(box: Any) -> Any:
    """Return the array in a metadata box, without the box's sharding: jzero decides how parameters are sharded."""
    return box.unbox(apply_constraint=False) if isinstance(box, meta.Partitioned) else box.unbox()


def _ids(tree: PyTree) -> list[int]:
    return [id(leaf) for leaf in jax.tree.leaves(tree)]
