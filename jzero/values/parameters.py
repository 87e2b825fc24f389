"""Tables of named parameters, an optimizer's or a schedule's: each row has a default and a kind of value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jzero.errors import shorten
from jzero.values.kinds import FLAG, Kind, as_json, closest, number, quote
from jzero.values.masking import mask


class Param(NamedTuple):
    """A parameter's default (`REQUIRED` if there is none) and kind; null is allowed where it is the default."""

    default: Any
    kind: Kind


ParamTable = Mapping[str, Param]

REQUIRED: Any = object()


def only(value: Any, why: str) -> Param:
    """Make a parameter that allows its default alone; `why` explains the error for any other value."""

    def parse(given: Any) -> Any:
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


def read_params(section: str, given: Mapping[str, Any], table: ParamTable) -> tuple[dict[str, Any], list[str]]:
    """Read parameters by a table.

    Args:
      section: their section in the config, for the messages.
      given: name -> value.
      table: the allowed parameters.

    Returns:
      The value of each parameter of the table, given or default, and a line for each unknown, missing or bad one.

    >>> read_params("optimizer.params", {"lr": "fast"}, {"lr": Param(0.1, number(0))})
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


def _shown(name: str, value: Any) -> str:
    """Write a value as in Python, masked under a secret's name and shortened."""
    return shorten(quote(mask(name, value)), 80)


_ANYTHING = Kind("a value", lambda value: value)


def _same_number(value: Any) -> Any:
    """Check a number and keep its type: optax counts with whole ones, in 32 bits."""
    number(-(2**31), most=2**31 - 1).parse(value) if isinstance(value, int) else number().parse(value)
    return value


_NUMBER = Kind("a number", _same_number)


def signature_params(function: Callable[..., Any]) -> dict[str, Param]:
    """Make a table of a Python function's parameters; the kind follows from the default.

    optax documents types in prose only, so a parameter whose default is neither a number nor a flag accepts any value
    here, and optax itself rejects bad ones.
    """

    def param(default: Any) -> Param:
        if default is inspect.Parameter.empty:
            return Param(REQUIRED, _ANYTHING)
        kind = FLAG if isinstance(default, bool) else _NUMBER if isinstance(default, int | float) else _ANYTHING
        return Param(default, kind)

    return {name: param(p.default) for name, p in inspect.signature(function).parameters.items()}
