"""The parts that all models of Flax modules share; calls of modules and of users' functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax

from jzero.adapters.torch_habits import refuses_of_models
from jzero.errors import ConfigError
from jzero.pictures.html import ParametersInHTML
from jzero.tree import PyTree

# A parameter of a module's call -> its value in training.
TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}
# The methods and properties by which a module describes itself, see `jzero.model`.
DESCRIPTIONS = (
    "report_notes", "weights_layout", "fused_matrices", "vocabulary", "vocab_size", "divided", "make_cache",
    "check_batch",
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
