"""Linen modules as models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen
from flax.core import meta

from jzero.adapters.constants import Constants
from jzero.adapters.methods import take_methods
from jzero.errors import ConfigError

PARAMS = "params"


class LinenModel:
    """A Linen module and a loss function as a model.

    Args:
      module: the module, not bound.
      loss_fn: `loss_fn(bound module, batch, rng)`.
      example: a batch, or its ShapeDtypeStructs; `init` calls the loss on zeros of these shapes.
      has_aux: whether the loss function returns metrics too.
    """

    def __init__(self, module: linen.Module, loss_fn: Callable, example: Any, has_aux: bool = False):
        self.linen, self.loss_fn, self.example, self.has_aux = module, loss_fn, example, has_aux
        self.collections = self._constant_collections()
        self.constants = Constants(self._make_constants)
        take_methods(self, module)

    def __repr__(self) -> str:
        return f"from_flax({type(self.linen).__name__})"

    def module(self, params: Any, rng: jax.Array | None = None) -> Any:
        constants = self.constants.values if self.collections else {}
        return self.linen.bind({PARAMS: params, **constants}, rngs=_streams(rng))

    def init(self, rng: jax.Array) -> Any:
        return self._variables(rng).get(PARAMS, {})

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> Any:
        return self.loss_fn(self.module(params, rng), batch, rng)

    def _variables(self, rng: jax.Array) -> dict[str, Any]:
        """Initialise all collections, without metadata boxes."""
        init = linen.init(lambda module, batch: self.loss_fn(module, batch, None), self.linen)
        return meta.map_axis_meta(_unbox, init({PARAMS: rng}, self._zeros()))

    def _zeros(self) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), x.dtype), self.example)

    def _make_constants(self) -> dict[str, Any]:
        variables = self._variables(jax.random.key(0))
        return {name: variables[name] for name in self.collections}

    def _constant_collections(self) -> list[str]:
        """Find the collections beside the parameters that the loss reads and does not change in training.

        Linen does not mark constant collections, so the loss is traced twice. With all collections mutable, the ones
        that change are sown values or state. Without these, and with nothing mutable, a loss that sows still works,
        and a loss with state fails.
        """
        shapes = jax.eval_shape(lambda: self._variables(jax.random.key(0)))
        names = sorted(set(shapes) - {PARAMS})
        if not names:
            return []
        changed: set[str] = set()

        def train(variables: Any, mutable: Any) -> Any:
            key = jax.random.key(0)
            apply = linen.apply(lambda module, batch: self.loss_fn(module, batch, key), self.linen, mutable=mutable)
            return apply(variables, self._zeros(), rngs=_streams(key))

        def find_changed(variables: Any) -> None:
            _, after = train(variables, names)
            # An unchanged variable comes back as the same tracer.
            changed.update(name for name in names if _ids(after.get(name)) != _ids(variables[name]))

        jax.eval_shape(find_changed, shapes)
        unchanged = {name: variables for name, variables in shapes.items() if name not in changed}
        try:
            jax.eval_shape(lambda variables: train(variables, False), unchanged)
        except flax.errors.FlaxError as error:
            raise ConfigError(
                f"from_flax: variable collections {sorted(changed)} are not parameters; only parameters are trained "
                "(use LayerNorm, RMSNorm or GroupNorm for BatchNorm)"
            ) from error
        return sorted(unchanged.keys() - {PARAMS})


def _streams(rng: jax.Array | None) -> dict[str, jax.Array] | None:
    """Return the keys for `make_rng`: "dropout", and "params", Linen's default for all other streams."""
    return None if rng is None else {"dropout": rng, PARAMS: jax.random.fold_in(rng, 1)}


def _unbox(box: Any) -> Any:
    """Return the array in a metadata box, without the box's sharding: jzero decides how parameters are sharded."""
    return box.unbox(apply_constraint=False) if isinstance(box, meta.Partitioned) else box.unbox()


def _ids(tree: Any) -> list[int]:
    return [id(leaf) for leaf in jax.tree.leaves(tree)]
