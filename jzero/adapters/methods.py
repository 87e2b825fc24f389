"""The parts that all models of Flax modules share; calls of modules, of users' functions and of criteria."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax

from jzero.adapters.torch_habits import check_no_torch_module, refuses_of_models
from jzero.errors import ConfigError
from jzero.model import StackModel
from jzero.pictures.html import ParametersInHTML
from jzero.tree import PyTree

# A parameter of a module's call -> its value in training.
TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}
# The methods and properties by which a module describes itself, see `jzero.model`.
DESCRIPTIONS = (
    "report_notes", "weights_layout", "fused_matrices", "vocabulary", "vocab_size", "divided", "make_cache",
    "make_prefix_cache", "check_batch",
)  # fmt: skip

Outcome = tuple[PyTree, dict[str, PyTree]]  # what a function returned, and {name: new value} of the state


@refuses_of_models
class FlaxModel(ParametersInHTML):
    """A model that is made of Flax modules.

    Attributes:
      name: of the module, for messages.
      values: only if the module was built already.
      example_batch: the shapes of a batch, if there is an example.
      prefix, suffix: only with a layer stack. The other attributes are described in `jzero.model`.
    """

    name: str
    has_aux: bool
    state: frozenset[str]
    values: PyTree
    example_batch: PyTree
    init: Callable[..., PyTree]
    adopt: Callable[[PyTree], PyTree]
    loss: Callable[..., PyTree]
    prefix: Callable[..., PyTree]
    suffix: Callable[..., PyTree]
    predicting: Callable[[Callable | None], Any]

    def __repr__(self) -> str:
        return f"from_flax({self.name})"


M = TypeVar("M", bound=FlaxModel)


def copy_description(model: FlaxModel, source: object, names: tuple[str, ...] = DESCRIPTIONS) -> None:
    """Copy what jzero reads of a module, or of another model, to a model."""
    vars(model).update({name: getattr(source, name) for name in names if hasattr(source, name)})


def changed(model: M, **attributes: object) -> M:
    """Copy a model with other attributes, or with functions in the place of its methods."""
    other = copy.copy(model)
    vars(other).update(attributes)
    return other


def add_state(model: FlaxModel, result: PyTree, new: dict[str, PyTree]) -> PyTree:
    """Return the result as `jzero.model` describes it: with the new state, if the model has state."""
    return (result, new) if model.state else result


class ModuleModel(FlaxModel):
    """A Flax module and a loss function as a model.

    Attributes:
      loss_fn: `loss_fn(module, batch, rng, extra=...)`.
      module: (params, rng) -> the module with its parameters; rng None is evaluation.
      run: (params, rng, f) -> `f(module)`, and the state after it.
    """

    loss_fn: Callable
    module: Callable[..., Any]
    run: Callable[[PyTree, jax.Array | None, Callable[[Any], PyTree]], Outcome]

    def loss(self, params: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        return add_state(self, *self.run(params, rng, lambda module: self.loss_fn(module, batch, rng, **extra)))

    def predicting(self, fn: Callable | None) -> Self:
        """Return the model with `fn(module, batch)`, or `module(batch)`, in the place of the loss."""
        return changed(self, loss_fn=predictor(fn), has_aux=False)

    def decode(self, params: PyTree, *args: PyTree) -> PyTree:
        return self.module(params).decode(*args)


def outputs_of(module: Any, inputs: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
    """Call a module; pass whether it trains, if its call has such an argument and its fields do not fix it.

    It is the "loss function" of a network whose criterion is outside.
    """
    signature = inspect.signature(type(module).__call__)
    taken = sorted(signature.parameters.keys() & TRAINING.keys())
    modes = {name: TRAINING[name] is (rng is not None) for name in taken if vars(module).get(name) is None}
    try:
        signature.bind(module, inputs, **modes)
    except TypeError as error:
        raise ConfigError(
            f"{type(module).__name__} is called with the inputs alone, but that fails ({error}): write the call in a "
            "loss_fn instead of a criterion, and predict with a function: jzero.make_eval_step(model, fn, config)"
        ) from None
    return module(inputs, **modes)


def stack_outputs(module: Any, x: PyTree, batch: PyTree) -> PyTree:
    """Call `module.outputs`: the predictions of a module that has a method `suffix`."""
    if not hasattr(module, "outputs"):
        raise ConfigError(
            f"{type(module).__name__} has no predictions: give it a method outputs(x, batch), with x the output of its "
            "layers, or pass a function of (module, x, batch) to jzero.make_eval_step"
        )
    return module.outputs(x, batch)


def predictor(fn: Callable | None) -> Callable:
    """Make a loss function of (module, batch, rng) that returns `fn(module, batch)`, or `module(batch)`."""
    return outputs_of if fn is None else lambda module, batch, rng, **extra: with_taken(extra, fn, module, batch)


def with_taken(extra: dict[str, PyTree], f: Callable, *args: PyTree) -> PyTree:
    """Call `f(*args, **extra)` with the keywords that f takes: `prefix` and `suffix` both may, but need not."""
    return f(*args, **{name: value for name, value in extra.items() if name in inspect.signature(f).parameters})


def extra_for(f: Callable, extra: dict[str, PyTree], refusal: str) -> dict[str, PyTree]:
    """Return `extra` as the keyword arguments of a function; one that requires it gets None where there is none.

    Args:
      extra: {"extra": value}, or {} where the step gets none.
      refusal: the message if the function does not take it.

    Raises:
      ConfigError: the function takes no `extra`, neither by this name nor among its `**keywords`.

    >>> extra_for(lambda x, extra: x, {}, ""), extra_for(lambda x, **keywords: x, {"extra": 1}, "")
    ({'extra': None}, {'extra': 1})
    """
    parameters = inspect.signature(f).parameters.values()
    own = [p for p in parameters if p.name == "extra" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if extra and not own and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(refusal)
    return extra or ({"extra": None} if any(p.default is p.empty for p in own) else {})


def with_rng(loss_fn: Callable) -> Callable:
    """Wrap `loss_fn` as a function of (module, batch, rng, extra=...), whether or not it takes the last two."""
    parameters = list(inspect.signature(loss_fn).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [
        p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in ("rng", "extra")
    ]
    if required:
        raise ConfigError(
            f"from_flax: loss_fn requires {', '.join(required)}; jzero passes only module, batch, rng and extra: bind "
            "the others with functools.partial"
        )
    third = [p for p in parameters[2:3] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A default is a setting, not a key.
    by_position = any((p.default is p.empty and p.name != "extra") or p.name == "rng" for p in third)
    by_name = not by_position and any(p.name == "rng" for p in named)
    refusal = "extra: the loss function does not take it; write def loss_fn(module, batch, extra)"

    def call(module: Any, batch: PyTree, rng: Any, **extra: Any) -> Any:
        extra = extra_for(loss_fn, extra, refusal)
        if by_position:
            return loss_fn(module, batch, rng, **extra)
        return loss_fn(module, batch, **({"rng": rng} if by_name else {}), **extra)

    return call


# ------------------------------------------------------------------ a criterion outside of the network

_IN_JAX = (
    "write it in JAX, as in criterion=lambda outputs, labels: "
    "optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()"
)


def add_criterion(net: M, criterion: Callable, has_aux: bool = False) -> M:
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

    def predicting(fn: Callable | None) -> M:
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
