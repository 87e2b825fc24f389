"""The kinds of value a key may have: what is allowed, in words, and a parser to jzero's spelling."""

import difflib
import json
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args


def show(value: object, width: int = 70) -> str:
    """The value as one would write it in the JSON file, cut to one readable line."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 3] + "..."


def either(choices: Iterable[object]) -> str:
    """The choices as prose.

    >>> either([1, 2, 4])
    '1, 2 or 4'
    """
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class Kind:
    """A kind of value: `parse` returns the value in jzero's spelling or raises ValueError (its text is a hint).

    >>> number(1, whole=True)("8")
    Traceback (most recent call last):
    ValueError: must be a positive integer; write it without quotes
    """

    allowed: str
    parse: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except (ValueError, OverflowError) as hint:
            raise ValueError(f"must be {self.allowed}" + (f"; {hint}" if str(hint) else "")) from None


def number(least: float = -math.inf, *, whole: bool = False, none: bool = False, or_: float | None = None) -> Kind:
    """A finite number >= `least` (0, 1 or no bound), or exactly `or_`; whole numbers may be written as 5e8."""

    def parse(value: Any) -> float | None:
        if value is None and none:
            return None
        if isinstance(value, str):
            raise ValueError("write it without quotes" if _is_number(value) else "")
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError
        result = (int(value) if isinstance(value, numbers.Integral) else int(float(value))) if whole else float(value)
        if result != value or (result < least and result != or_):
            raise ValueError
        return result

    sign = {-math.inf: "", 0: "non-negative ", 1: "positive "}[least]
    choices = [str(or_)] * (or_ is not None) + [f"a {sign}{'integer' if whole else 'number'}"] + ["null"] * none
    return Kind(either(choices), parse)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def one_of(choices: Collection[str], spellings: Mapping[str, str] | None = None, *, none: Any = ...) -> Kind:
    """One of `choices`, in any letter case; `spellings` are accepted too, and null means `none` where it is given."""
    known = {**{c: c for c in choices}, **(spellings or {})}

    def parse(value: Any) -> str | None:
        if value is None and none is not ...:
            return none
        if not isinstance(value, str):
            raise ValueError
        if value.lower() not in known:
            close = difflib.get_close_matches(value.lower(), choices, n=1)
            raise ValueError(f"did you mean {show(close[0])}?" if close else "")
        return known[value.lower()]

    return Kind(either([*map(show, choices), *["null"] * (none is None)]), parse)


def instance(allowed: str, *types: type) -> Kind:
    """A value of one of the Python types, as it is."""

    def parse(value: Any) -> Any:
        if not isinstance(value, types):
            raise ValueError("write it without quotes" if bool in types and value in ("true", "false") else "")
        return value

    return Kind(allowed, parse)


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    for name, option in value.items():
        if not isinstance(option, bool | int | float | str):
            raise ValueError(f"{name} = {show(option)} must be true, false, a number or a string")
    return dict(value)


def _patterns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"write [{show(value)}]" if isinstance(value, str) else "")
    for pattern in value:
        if not isinstance(pattern, str):
            raise ValueError(f"{show(pattern)} is not a string")
        try:
            re.compile(pattern)
        except re.error as wrong:
            raise ValueError(f"{show(pattern)} does not compile: {wrong}") from None
    return tuple(value)


def _stage(value: Any) -> int:
    if (stage := COUNT.parse(value)) > 3:
        raise ValueError
    return stage


Dtype = Literal["fp32", "fp16", "bf16"]
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_SPELLINGS = _DTYPES | {f"torch.{name}": dtype for name, dtype in _DTYPES.items()}

DTYPE = one_of(get_args(Dtype), _SPELLINGS, none="fp32")
DTYPE_OR_NULL = one_of(get_args(Dtype), _SPELLINGS, none=None)
FLAG = instance("true or false", bool)
TEXT = instance("a string", str)
COUNT = number(0, whole=True)
POSITIVE = number(1, whole=True)
POSITIVE_OR_NULL = number(1, whole=True, none=True)
POSITIVE_OR_REST = number(1, whole=True, or_=-1)
NON_NEGATIVE = number(0)
STAGE = Kind("0, 1, 2 or 3", _stage)
UNROLL = Kind('true, false or "auto"', lambda value: value if value == "auto" else FLAG.parse(value))
NAMES = instance("a list of names", list, tuple)
PATTERNS = Kind("a list of regular expressions", _patterns)
PARAMS = instance("an object of names and values", dict)
OPTIONS = Kind("an object of XLA option names and values", _options)
