"""The loop with a criterion outside of the model: `outputs = engine(inputs)`, `loss = engine.loss(outputs, labels)`."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils

from jzero.batch import host_arrays, rows_of_this_process
from jzero.engine.deferred_loss import Outputs
from jzero.errors import ConfigError
from jzero.state import TrainState
from jzero.train_step import TrainStep
from jzero.tree import leading_dim


def check_criterion(model: Any) -> None:
    """Raise a ConfigError unless the model is a network with a criterion."""
    if not hasattr(model, "criterion"):
        raise ConfigError(
            "engine.loss: this model has its loss inside, so write loss = engine(batch); for a loss outside, pass the "
            "Flax module and the loss to jzero.initialize(model=module, criterion=criterion)"
        )


class Outside:
    """The last forward pass of a model with a criterion, until its loss is asked for.

    Attributes:
      inputs: of the last forward pass, on the devices in training.
    """

    def __init__(self) -> None:
        self.inputs: Any = None
        self._outputs: Outputs | None = None

    def forward(self, step: TrainStep, state: TrainState, inputs: Any, index: int | None) -> Outputs:
        """Defer the outputs for inputs; `index` is the micro-batch's in this step, None in evaluation."""
        inputs = host_arrays(inputs)
        rows = leading_dim(inputs) if jax.tree.leaves(inputs) else 0
        placed = inputs if index is None else step.place_micro_batch(inputs)

        def compute() -> Any:
            if state.step.is_deleted():
                raise ConfigError(
                    "these outputs were not read before a later step replaced their parameters: read them before "
                    "engine.step()"
                )
            return _of_process(step.predict(state, placed, dropout=index), step, rows)

        self.inputs, self._outputs = placed, Outputs(compute)
        return self._outputs

    def batch(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        """Join the last inputs and their labels; `outputs` must be the last outputs."""
        if self._outputs is None or outputs is not self._outputs:
            raise ConfigError(
                "engine.loss(outputs, labels): these outputs are not those that the last engine(inputs) returned; pass "
                "them as they are: what changes them belongs into the model or the criterion"
            )
        return self.inputs, labels

    def forget(self) -> None:
        """Free the last inputs."""
        self.inputs = self._outputs = None


def _of_process(outputs: Any, step: TrainStep, rows: int) -> Any:
    """Return the rows that this process passed: all, or with several processes perhaps its own."""
    if jax.process_count() == 1:
        return outputs
    whole = multihost_utils.process_allgather(outputs, tiled=True)
    if rows == leading_dim(whole):
        return whole
    mine = rows_of_this_process(step.batch_sharding, leading_dim(whole))
    return jax.tree.map(lambda x: x[mine], whole)
