"""The methods and properties by which a Flax module describes itself; calls of modules and of users' functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jzero.errors import ConfigError

# A parameter of a module's call -> its value in training.
TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}


def take_methods(model: Any, module: Any) -> None:
    """Copy the methods and properties that jzero reads from a module to its model."""
    described = ("report_notes", "weights_layout", "fused_matrices", "vocabulary", "vocab_size", "divided")
    for name in (*described, "make_cache", "check_batch"):
        if hasattr(module, name):
            setattr(model, name, getattr(module, name))


def outputs_of(module: Any, inputs: Any, training: bool) -> Any:
    """Call a module; pass whether it trains, if its call has such an argument and its fields do not fix it."""
    signature = inspect.signature(type(module).__call__)
    taken = sorted(signature.parameters.keys() & TRAINING.keys())
    modes = {name: TRAINING[name] is training for name in taken if vars(module).get(name) is None}
    try:
        signature.bind(module, inputs, **modes)
    except TypeError as error:
        raise ConfigError(
            f"{type(module).__name__} is called with the inputs alone, but that fails ({error}): write the call in a "
            "loss_fn instead of a criterion, and predict with a function: jzero.make_eval_step(model, fn, config)"
        ) from None
    return module(inputs, **modes)


def extra_for(f: Callable, extra: dict[str, Any], refusal: str) -> dict[str, Any]:
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
