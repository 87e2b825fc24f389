"""A network and a criterion as a model: for loops in which the loss function is outside of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jzero.adapters.methods import extra_for
from jzero.adapters.torch_habits import check_no_torch_module, refuses_of_models
from jzero.errors import ConfigError
from jzero.model import StackModel
from jzero.pictures.html import ParametersInHTML

_IN_JAX = (
    "write it in JAX, as in criterion=lambda outputs, labels: "
    "optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()"
)


@refuses_of_models
class CriterionModel(ParametersInHTML):
    """A model whose loss is criterion(outputs of the network, labels), and whose batches are (inputs, labels).

    Args:
      net: a model whose "loss" of the inputs is the network's outputs; with a layer stack, those of its `suffix`.
      criterion: `criterion(outputs, labels)` -> what a model's loss returns.
      has_aux: the criterion returns (loss, {name: metric}).
    """

    def __init__(self, net: Any, criterion: Callable, has_aux: bool = False):
        check_no_torch_module("criterion", criterion, _IN_JAX)
        if not callable(criterion):
            raise ConfigError(f"criterion = {criterion!r}: must be a function (outputs, labels) -> loss")
        self.net, self.criterion, self.has_aux = net, criterion, has_aux
        self.init, self.module, self.state = net.init, net.module, net.state
        # Not `vocabulary`: in a pipeline, the stages would divide what the criterion needs whole.
        cached = ("make_cache", "vocab_size", "decode", "decode_prefix", "decode_block", "decode_suffix")
        stacked = ("plain", "names", "one_key")
        for name in (
            "report_notes",
            "weights_layout",
            "fused_matrices",
            "divided",
            "adopt",
            "values",
            *stacked,
            *cached,
        ):
            if hasattr(net, name):
                setattr(self, name, getattr(net, name))
        if hasattr(net, "check_batch"):
            self.check_batch = lambda batch: net.check_batch(inputs_and_labels(batch)[0])
        if isinstance(net, StackModel):
            self.prefix, self.block, self.suffix = self._prefix, net.block, self._suffix

    def __repr__(self) -> str:
        return repr(self.net)

    def loss(self, params: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        inputs, labels = inputs_and_labels(batch)
        return self._apply(self.net.loss(params, inputs, rng), labels, extra)

    def predicting(self, fn: Callable | None) -> Any:
        """Return the network, whose batches are inputs: with `fn` as in its own `predicting`, or with its outputs."""
        return self.net if fn is None else self.net.predicting(fn)

    def _prefix(self, ends: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        return self.net.prefix(ends, inputs_and_labels(batch)[0], rng)

    def _suffix(self, ends: Any, x: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        inputs, labels = inputs_and_labels(batch)
        return self._apply(self.net.suffix(ends, x, inputs, rng), labels, extra)

    def _apply(self, result: Any, labels: Any, extra: dict[str, Any]) -> Any:
        """Replace the outputs in what a function of the network returned by their loss."""
        extra = extra_for(
            self.criterion, extra, "extra: the criterion does not take it; write def criterion(outputs, labels, extra)"
        )
        if not self.state:
            return self.criterion(result, labels, **extra)
        outputs, new_state = result
        return self.criterion(outputs, labels, **extra), new_state


def inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    """Return the two parts of a batch."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        size = f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
        shape = f" of shape {batch.shape}" if hasattr(batch, "shape") else ""
        raise ConfigError(
            "with a criterion or a PipelineModule a batch is (inputs, labels), but this is a "
            f"{type(batch).__name__}{size}{shape}"
        )
    return batch[0], batch[1]
