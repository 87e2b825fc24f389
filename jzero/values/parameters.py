"""Tables of named parameters, an optimizer's or a schedule's: each row has a default and a kind of value.

Where a config says "auto", the Hugging Face Trainer writes its arguments. Without it nobody fills in these values, and
DeepSpeed stops at the word; jzero takes the defaults of the Trainer's arguments.
Source: integrations/deepspeed.py and training_args.py of transformers 5.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from jzero.errors import mask, shorten
from jzero.values.kinds import FLAG, Kind, as_json, closest, number, quote

MICRO_BATCH = 8  # per_device_train_batch_size
EPOCHS = 3  # num_train_epochs
TRAINER_PARAMS: dict[str, Any] = {
    "lr": 5e-5,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_min_lr": 0.0,
    "warmup_num_steps": 0,
}


class Param(NamedTuple):
    """A parameter's default (`REQUIRED` if there is none) and kind; null is allowed where it is the default."""

    default: Any
    kind: Kind


ParamTable = Mapping[str, Param]
Values = Mapping[str, Any]  # name of a parameter -> value

REQUIRED: Any = object()


def only(value: object, why: str) -> Param:
    """Make a parameter that allows its default alone; `why` explains the error for any other value."""

    def parse(given: object) -> object:
        if given != value:
            raise ValueError(why)
        return value

    return Param(value, Kind(as_json(value), parse))


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """End a sentence about an unknown name, with the choice that resembles it.

    >>> did_you_mean("wd", ["lr"]), did_you_mean("lrr", ["lr"])
    ('.', "; did you mean 'lr'?")
    """
    close = closest(name, choices)
    return f"; did you mean {close!r}?" if close else "."


def read_by_table(section: str, given: Values, table: ParamTable) -> tuple[dict[str, Any], list[str]]:
    """Read parameters by a table.

    Args:
      section: their section in the config, for the messages.
      given: name -> value.
      table: the allowed parameters.

    Returns:
      The value of each parameter of the table, given or default, and a line for each unknown, missing or bad one.

    >>> read_by_table("optimizer.params", {"lr": "fast"}, {"lr": Param(0.1, number(0))})
    ({'lr': 0.1}, ["optimizer.params.lr: 'fast' must be a non-negative number"])
    """
    values = {name: param.default for name, param in table.items()}
    problems = []
    for name, value in given.items():
        if name not in table:
            hint = f"{did_you_mean(name, table)} Allowed: {', '.join(table) or 'none'}"
            problems.append(f"{section}.{name}: unknown parameter (value {_shown(name, value)}){hint}")
        elif value is not None or table[name].default is not None:
            try:
                values[name] = table[name].kind(value)
            except ValueError as wrong:
                problems.append(f"{section}.{name}: {_shown(name, value)} {wrong}")
    for name, param in table.items():
        if param.default is REQUIRED and name not in given:
            problems.append(f"{section}.{name}: missing; give {param.kind.allowed}")
    return values, problems


def _shown(name: str, value: object) -> str:
    """Write a value as in Python, masked under a secret's name and shortened."""
    return shorten(quote(mask(name, value)), 80)


_ANYTHING = Kind("a value", lambda value: value)


def _same_number(value: object) -> object:
    """Check a number and keep its type: optax counts with whole ones, in 32 bits."""
    number(-(2**31), most=2**31 - 1).parse(value) if isinstance(value, int) else number().parse(value)
    return value


_NUMBER = Kind("a number", _same_number)


def signature_params(function: Callable[..., Any]) -> dict[str, Param]:
    """Make a table of a Python function's parameters; the kind follows from the default.

    optax documents types in prose only, so a parameter whose default is neither a number nor a flag accepts any value
    here, and optax itself rejects bad ones.
    """

    def param(default: object) -> Param:
        if default is inspect.Parameter.empty:
            return Param(REQUIRED, _ANYTHING)
        kind = FLAG if isinstance(default, bool) else _NUMBER if isinstance(default, int | float) else _ANYTHING
        return Param(default, kind)

    return {name: param(p.default) for name, p in inspect.signature(function).parameters.items()}


class Total(NamedTuple):
    """The optimizer steps of a run, for the `total_num_steps` of a schedule, and who says so."""

    steps: int
    why: str


def is_auto(value: object) -> bool:
    """Return whether a value is the word "auto"."""
    return isinstance(value, str) and value == "auto"


def fill_autos(params: Values, known: Container[str]) -> dict[str, Any]:
    """Replace "auto" by the Trainer's default; leave a parameter out for which it has none, or that is not `known`.

    >>> fill_autos({"lr": "auto", "betas": "auto", "momentum": "auto", "nesterov": True}, ["lr", "momentum"])
    {'lr': 5e-05, 'nesterov': True}
    """
    return {
        name: TRAINER_PARAMS[name] if is_auto(value) else value
        for name, value in params.items()
        if not is_auto(value) or (name in TRAINER_PARAMS and name in known)
    }
