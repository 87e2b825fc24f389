"""What a model is, and Flax modules as models.

A model is anything with

    init(rng) -> params                                a pytree of arrays
    loss(params, batch, rng) -> scalar | (sum, count)  rng is None in evaluation: no dropout

`(sum, count)` makes the loss of the global batch sum of sums over sum of counts, whatever the micro-batches
hold; a scalar is averaged. Parameters arrive in the compute dtype, the batch as it was given: cast its floats where
half precision is meant (`x.astype(self.kernel.dtype)`), or set `fp16.auto_cast`.

A model with a layer stack keeps its parameters as {"ends": ..., "stack": ...}, each leaf of the stack with a
leading layer axis [L, ...], and also has

    prefix(ends, batch, rng) -> x                      x: any pytree of arrays
    block(layer, x, rng) -> x                          one layer: a slice of the stack
    suffix(ends, x, batch, rng) -> scalar | (sum, count)

which is what lets ZeRO-3 gather, activation checkpointing and the pipeline work layer by layer.

Its `vocabulary: dict[str, int]` may name leaves of the ends, and the dimension that is their vocabulary's, of a model
whose prefix and suffix use them through `jzero.pipeline.vocab_parallel` alone: a pipeline divides those among its
stages.

Any model may also have `report_notes(dtype) -> list[str]`: lines of its own for the run report, given the compute
dtype; and `weights_layout() -> dict`: what its parameters are called elsewhere (`jzero.weights.layout`). A Flax
module's methods of those names are taken.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jzero.errors import ConfigError

ENDS, STACK = "ends", "stack"


@runtime_checkable
class Model(Protocol):
    """Anything that can be initialised and has a loss; see the module's docstring."""

    def init(self, rng: jax.Array) -> Any: ...
    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> Any: ...


@runtime_checkable
class StackModel(Model, Protocol):
    """A model that is prefix + layer stack + suffix."""

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None) -> Any: ...
    def block(self, layer: Any, x: Any, rng: jax.Array | None) -> Any: ...
    def suffix(self, ends: Any, x: Any, batch: Any, rng: jax.Array | None) -> Any: ...


def check_model(model: Any) -> None:
    """Raise a ConfigError unless `model` follows the protocol."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"model is {type(model).__name__}, which has no init(rng) and loss(params, batch, rng): "
            "wrap a Flax module with jzero.from_flax(module_fn, loss_fn)"
        )


def fold(rng: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """The `index`-th key below `rng`; None (evaluation) stays None."""
    return None if rng is None else jax.random.fold_in(rng, index)


def stack_loss(model: StackModel, params: Any, batch: Any, rng: jax.Array | None) -> Any:
    """The loss of a stacked model with nothing parallel about it: prefix, then every block, then suffix."""
    x = model.prefix(params[ENDS], batch, fold(rng, 0))
    length = jax.tree.leaves(params[STACK])[0].shape[0]

    def layer(x: Any, item: Any) -> tuple[Any, None]:
        index, weights = item
        return model.block(weights, x, fold(rng, index + 1)), None

    x, _ = jax.lax.scan(layer, x, (jnp.arange(length), params[STACK]))
    return model.suffix(params[ENDS], x, batch, fold(rng, length + 1))


def weights_layout(model: Any) -> dict[str, Any] | None:
    """What the model's parameters are called elsewhere; None if it does not say."""
    return getattr(model, "weights_layout", lambda: None)()
