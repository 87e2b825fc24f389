"""A network and a criterion as a model: for loops in which the loss function is outside of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from jzero.adapters.methods import FlaxModel, add_state, changed, extra_for
from jzero.adapters.torch_habits import check_no_torch_module
from jzero.errors import ConfigError
from jzero.model import StackModel
from jzero.tree import PyTree

Net = TypeVar("Net", bound=FlaxModel)

_IN_JAX = (
    "write it in JAX, as in criterion=lambda outputs, labels: "
    "optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()"
)


def add_criterion(net: Net, criterion: Callable, has_aux: bool = False) -> Net:
    """Make the model whose loss is criterion(outputs of the network, labels), and whose batches are (inputs, labels).

    Args:
      net: a model whose "loss" of the inputs is the network's outputs; with a layer stack, those of its `suffix`.
      criterion: `criterion(outputs, labels)` -> what a model's loss returns.
      has_aux: the criterion returns (loss, {name: metric}).
    """
    check_no_torch_module("criterion", criterion, _IN_JAX)
    if not callable(criterion):
        raise ConfigError(f"criterion = {criterion!r}: must be a function (outputs, labels) -> loss")
    refusal = "extra: the criterion does not take it; write def criterion(outputs, labels, extra)"

    def apply(result: PyTree, labels: PyTree, extra: dict[str, PyTree]) -> PyTree:
        outputs, new = result if net.state else (result, {})
        return add_state(net, criterion(outputs, labels, **extra_for(criterion, extra, refusal)), new)

    def loss(params: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        inputs, labels = inputs_and_labels(batch)
        return apply(net.loss(params, inputs, rng), labels, extra)

    def prefix(ends: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        return net.prefix(ends, inputs_and_labels(batch)[0], rng)

    def suffix(ends: PyTree, x: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        inputs, labels = inputs_and_labels(batch)
        return apply(net.suffix(ends, x, inputs, rng), labels, extra)

    def predicting(fn: Callable | None) -> Net:
        """Return the network, whose batches are inputs: with `fn` as in its own `predicting`, or with its outputs."""
        return net if fn is None else net.predicting(fn)

    functions: dict[str, Callable] = {"loss": loss, "predicting": predicting}
    if isinstance(net, StackModel):
        functions |= {"prefix": prefix, "suffix": suffix}
    if hasattr(net, "check_batch"):
        functions["check_batch"] = lambda batch: net.check_batch(inputs_and_labels(batch)[0])
    model = changed(net, criterion=criterion, has_aux=has_aux, **functions)
    vars(model).pop("vocabulary", None)  # in a pipeline, the stages would divide what the criterion needs whole
    return model


def inputs_and_labels(batch: PyTree) -> tuple[PyTree, PyTree]:
    """Return the two parts of a batch."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        size = f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
        shape = f" of shape {batch.shape}" if hasattr(batch, "shape") else ""
        raise ConfigError(
            "with a criterion or a PipelineModule a batch is (inputs, labels), but this is a "
            f"{type(batch).__name__}{size}{shape}"
        )
    return batch[0], batch[1]
