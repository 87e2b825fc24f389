"""Losses and outputs that are computed when they are read: the three-call loop, also with a criterion outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.adapters.torch_habits import refuses
from jzero.errors import ConfigError
from jzero.run.deepspeed_names import NoSuchNameError
from jzero.step.batch import host_arrays, rows_of_this_process
from jzero.step.state import TrainState
from jzero.step.train_step import TrainStep
from jzero.tree import leading_dim

COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
CONVERSIONS = ("neg", "pos", "abs", "bool", "int", "float", "complex", "round")


class Deferred:
    """A value that is computed when it is first read; otherwise like the value."""

    def __init__(self, compute: Callable[[], Any]):
        self._compute: Callable[[], Any] | None = compute
        self._value: Any = None

    @property
    def value(self) -> Any:
        if self._compute is not None:
            self._value, self._compute = self._compute(), None  # frees the micro-batch that it closes over
        return self._value

    def replace(self, compute: Callable[[], Any]) -> None:
        """Use `compute` as the source of the value, unless it is already computed."""
        if self._compute is not None:
            self._compute = compute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols (copy, pickle, ...) ask for these, and must not start a forward pass
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value, name)

    __hash__ = object.__hash__  # __eq__ below would remove it

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'not computed yet' if self._compute else self.value})"


@refuses(
    backward="write engine.backward(loss); the engine computes the gradients at engine.step()",
    cpu="write float(loss)",
    detach="write float(loss); a loss has no graph to detach from",
    requires_grad_="leave it out; engine.backward(loss) asks for the gradients",
)
class Loss(Deferred):
    """The loss of a micro-batch, like a JAX scalar.

    The three-call loop runs the program of `train_batch`, at `step()`. A loss read after `step()` is free; a loss
    read before it costs an extra forward pass, from the model's state at the beginning of the step: if a training loss
    depends on state that the step's earlier micro-batches move, it differs from the loss after `step()`. (BatchNorm's
    does not.) Arithmetic returns an array, which `engine.backward` does not take.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "loss":  # what transformers returns has it
            raise NoSuchNameError("loss.loss: leave it out: engine(batch) returns the loss itself")
        return super().__getattr__(name)

    def item(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"Loss({'not computed yet' if self._compute else self.item()})"


@refuses(
    backward="write engine.backward(engine.loss(outputs, labels))",
    detach="write np.asarray(outputs), or engine.loss(outputs, labels)",
    cpu="write np.asarray(outputs)",
    numpy="write np.asarray(outputs)",
)
class Outputs(Deferred):
    """The outputs of a model with a criterion for one micro-batch: arrays over the micro-batch's rows.

    `engine.loss(outputs, labels)` does not compute them: the step's program makes them again. Reading them costs a
    forward pass.
    """


def _delegate(name: str) -> Callable:
    def method(self: Deferred, *others: Any) -> Any:
        return getattr(self.value, name)(*(x.value if isinstance(x, Deferred) else x for x in others))

    return method


# Python looks operators up on the class, so __getattr__ does not see them.
for _name in (*COMPARISONS, *ARITHMETIC, *(f"r{name}" for name in ARITHMETIC), *CONVERSIONS):
    setattr(Deferred, f"__{_name}__", _delegate(f"__{_name}__"))
for _name in ("getitem", "len", "iter"):
    setattr(Outputs, f"__{_name}__", _delegate(f"__{_name}__"))

# jnp's functions are jitted, and jit flattens its arguments: as a tree, a deferred value is its value.
for _type in (Loss, Outputs):
    jax.tree_util.register_pytree_node(_type, lambda x: ((x.value,), None), lambda _, leaves: leaves[0])


def check_outputs(model: Any, outputs: Any, last: Outputs | None) -> None:
    """Raise a ConfigError unless the model is a network with a criterion, and these are its `last` outputs."""
    if not hasattr(model, "criterion"):
        raise ConfigError(
            "engine.loss: this model has its loss inside, so write loss = engine(batch); for a loss outside, pass the "
            "Flax module and the loss to jzero.initialize(model=module, criterion=criterion)"
        )
    if last is None or outputs is not last:
        raise ConfigError(
            "engine.loss(outputs, labels): these outputs are not those that the last engine(inputs) returned; pass "
            "them as they are: what changes them belongs into the model or the criterion"
        )


def deferred_outputs(step: TrainStep, state: TrainState, inputs: Any, index: int | None) -> tuple[Outputs, Any]:
    """Defer the outputs for inputs; return them with the inputs, which are on the devices in training.

    Args:
      index: of the micro-batch in this step, None in evaluation.
    """
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

    return Outputs(compute), placed


def _of_process(outputs: Any, step: TrainStep, rows: int) -> Any:
    """Return the rows that this process passed: all, or with several processes perhaps its own."""
    if jax.process_count() == 1:
        return outputs
    whole = multihost_utils.process_allgather(outputs, tiled=True)
    if rows == leading_dim(whole):
        return whole
    mine = rows_of_this_process(step.batch_sharding, leading_dim(whole))
    return jax.tree.map(lambda x: x[mine], whole)
