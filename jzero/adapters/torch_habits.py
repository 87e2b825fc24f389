"""Calls of PyTorch's training loops that have no meaning here: each is an error that says what to write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from jzero.errors import ConfigError

T = TypeVar("T", bound=type)


def refuses(**instead: str) -> Callable[[T], T]:
    """Give a class a method for each name, which raises a ConfigError with the text.

    >>> @refuses(cuda="leave it out")
    ... class Model: ...
    >>> Model().cuda()
    Traceback (most recent call last):
        ...
    jzero.errors.ConfigError: Model.cuda(): leave it out
    """

    def add(cls: T) -> T:
        for name, text in instead.items():
            setattr(cls, name, _refusal(name, text))
        return cls

    return add


def _refusal(name: str, text: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise an error that says what to write instead."""
        raise ConfigError(f"{type(self).__name__}.{name}(): {text}")

    return method


def check_no_torch_module(what: str, x: Any, instead: str) -> None:
    """Raise a ConfigError if `x` is a torch.nn.Module, a class of them, or a function of PyTorch.

    Args:
      what: its name in the message.
      instead: what to write.
    """
    kind = getattr(sys.modules.get("torch.nn"), "Module", None)
    cls = x if isinstance(x, type) else type(x)
    if kind is not None and issubclass(cls, kind):
        raise ConfigError(f"{what} = {cls.__name__} is a torch.nn.Module, which JAX cannot run: {instead}")
    if str(getattr(x, "__module__", "")).split(".")[0] == "torch":
        raise ConfigError(f"{what} = {x.__name__} is a function of PyTorch, which JAX cannot run: {instead}")


_PLACED = "leave it out: jzero.initialize puts the parameters on the devices"
_HOLDERS = {
    "to": _PLACED,
    "cuda": _PLACED,
    "half": 'write "fp16": {"enabled": true} in the config',
    "bfloat16": 'write "bf16": {"enabled": true} in the config',
}
_MODULES = _HOLDERS | {
    "train": "write engine.train()",
    "eval": "write engine.eval()",
    "state_dict": "read engine.state.params, or write engine.save_16bit_model(directory)",
    "load_state_dict": "write engine.load_weights(directory)",
}
_PARAMETERS = {
    "parameters": "read engine.state.params; the config has the optimizer's groups",
    "named_parameters": "read engine.state.params; jzero.report(engine.step_fn) lists the names",
}

refuses_of_models = refuses(
    **_MODULES,
    parameters="leave out model_parameters and optimizer: the config has the optimizer, with its groups of parameters",
    named_parameters="name the parameters in the config: optimizer.groups, frozen_parameters",
)
refuses_of_modules = refuses(**_MODULES, **_PARAMETERS)
refuses_of_engines = refuses(
    **_HOLDERS,
    **_PARAMETERS,
    state_dict="read engine.state, or write engine.save_checkpoint(directory)",
    load_state_dict="write engine.load_checkpoint(directory) or engine.load_weights(directory)",
    scale="write engine.backward(loss), which scales the loss",
    compile="leave it out: the step is always compiled",
)
