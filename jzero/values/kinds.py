"""The kinds of value of a key or parameter: the allowed values in words, and a parser to jzero's spelling."""

import difflib
import json
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from jzero.errors import mask, printable

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


def as_json(value: object, width: int = 70) -> str:
    """Write the value as in the JSON file, cut to `width` characters."""
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, numbers of 5,000 digits, deep nesting
        text = f"<{type(value).__name__}>"
    return text if len(text) <= width else text[: width - 3] + "..."


def quote(value: object) -> str:
    """Write the value as in Python; its type if it has no text, as a number of 5,000 digits."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def either(choices: Iterable[object]) -> str:
    """Join the choices as prose.

    >>> either([1, 2, 4])
    '1, 2 or 4'
    """
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
      allowed: the allowed values in words, to follow "must be".
      parse: returns the value in jzero's spelling, or raises ValueError with a hint, or with no text.

    >>> number(1, whole=True)("8")
    Traceback (most recent call last):
    ValueError: must be a positive integer; write it without quotes
    """

    allowed: str
    parse: Callable[[Any], Any]

    def __call__(self, value: object) -> Any:
        try:
            return self.parse(value)
        except (ValueError, OverflowError) as hint:
            # pydantic cannot carry a lone surrogate, so the text is made printable here and not in ConfigError
            raise ValueError(printable(f"must be {self.allowed}" + (f"; {hint}" if str(hint) else ""))) from None

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> "CoreSchema":
        """Let a kind be the annotation of a field, which it then checks."""
        from pydantic_core import core_schema  # here, since the launcher works without it

        return core_schema.no_info_plain_validator_function(self, json_schema_input_schema=core_schema.any_schema())


LARGEST, SMALLEST = float.fromhex("0x1.fffffep127"), 2.0**-126
"""float32's largest and smallest normal numbers: beyond them a value turns into inf or 0 inside the compiled step."""


def number(
    least: float = -math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    whole: bool = False,
    float32: bool = False,
) -> Kind:
    """Make the kind of a finite number within bounds.

    Args:
      least, above, below, most: the bounds; `above` and `below` exclude the bound itself.
      whole: only whole numbers, which may be written as 5e8.
      float32: only 0 and float32's normal numbers.

    >>> number(0, below=1).allowed, number(0, whole=True).allowed, number(above=0, float32=True).allowed
    ('a number >= 0 and < 1', 'a non-negative integer', "a number > 0 in float32's range")
    """

    def parse(value: object) -> float:
        if isinstance(value, str):
            raise ValueError("write it without quotes" if _is_number(value) else "")
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError
        result = (int(value) if isinstance(value, numbers.Integral) else int(float(value))) if whole else float(value)
        within = least <= result <= most and above < result < below
        normal = not float32 or not result or SMALLEST <= abs(result) <= LARGEST
        if result != value or not within or not normal:
            raise ValueError
        return result

    noun = "integer" if whole else "number"
    limits = ((">=", least), (">", above), ("<=", most), ("<", below))
    bounds = [f"{sign} {limit}" for sign, limit in limits if math.isfinite(limit)]
    article = "an" if whole else "a"
    words = {"": f"{article} {noun}", ">= 0": f"a non-negative {noun}", ">= 1": f"a positive {noun}"}
    text = f"{article} {noun} {' and '.join(bounds)}".rstrip()
    text = f"{text} in float32's range" if float32 else words.get(" and ".join(bounds), text)
    return Kind(text, parse)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def closest(name: object, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the choice that resembles `name` most, in any letter case; None below the similarity `cutoff`.

    One with the same letters in another order comes first: difflib rates swapped letters below added ones.

    >>> closest("adamm", ["SGD", "Adam"]), closest("AdmaW", ["adamaxw", "AdamW"])
    ('Adam', 'AdamW')
    """
    if len(str(name)) > 100:  # difflib needs a second for a megabyte
        return None
    known = {choice.lower(): choice for choice in choices}
    letters = sorted(str(name).lower())
    swapped = [choice for choice in known if sorted(choice) == letters]
    close = swapped or difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=cutoff)
    return known[close[0]] if close else None


def one_of(choices: Collection[str], spellings: Mapping[str, str] | None = None, *, none: Any = ...) -> Kind:
    """Make the kind of one of `choices`, in any letter case.

    Args:
      choices: the allowed words.
      spellings: other word -> choice, accepted silently.
      none: the choice that null means; without it null is an error.
    """
    known = {**{c.lower(): c for c in choices}, **(spellings or {})}

    def parse(value: object) -> str | None:
        if value is None and none is not ...:
            return none
        if not isinstance(value, str):
            raise ValueError
        if value.lower() not in known:
            close = closest(value, choices)
            raise ValueError(f"did you mean {as_json(close)}?" if close else "")
        return known[value.lower()]

    return Kind(either([*map(as_json, choices), *["null"] * (none is None)]), parse)


def or_null(kind: Kind) -> Kind:
    """Allow null too."""
    return Kind(f"{kind.allowed} or null", lambda value: None if value is None else kind.parse(value))


def instance(allowed: str, *types: type) -> Kind:
    """Make the kind of a value of one of the Python types, kept unchanged."""

    def parse(value: object) -> object:
        if not isinstance(value, types):
            raise ValueError
        return value

    return Kind(allowed, parse)


def _flag(value: object) -> bool:
    """Check a flag; 0 and 1 are flags too, as in DeepSpeed."""
    if not isinstance(value, bool) and not (isinstance(value, int) and value in (0, 1)):
        # "true" in quotes is a common mistake where a flag is meant
        raise ValueError("write it without quotes" if value in ("true", "false") else "")
    return bool(value)


def _every(value: object) -> int | None:
    """Check an interval of steps; accelerate writes Infinity for "never"."""
    if value == math.inf or (isinstance(value, str) and value.lower() in ("inf", "infinity")):
        return None
    return POSITIVE_OR_NULL.parse(value)


def _text(value: object) -> str:
    """Check a string that may become a path, or go into a file."""
    if not isinstance(value, str):
        raise ValueError
    if re.search("[\0\ud800-\udfff]", value):
        raise ValueError("it contains a NUL or a lone surrogate")
    return value


def _options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    for name, option in value.items():
        if not isinstance(name, str):
            raise ValueError(f"the name {as_json(name)} must be a string")
        if not isinstance(option, bool | int | float | str):
            raise ValueError(f"{name} = {as_json(mask(name, option))} must be true, false, a number or a string")
    return dict(value)


_PATTERN_CHARACTERS = 100_000  # which Python's `re` compiles in about half a second


def _patterns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"write [{as_json(value)}]" if isinstance(value, str) else "")
    if sum(len(pattern) for pattern in value if isinstance(pattern, str)) > _PATTERN_CHARACTERS:
        raise ValueError(f"together they have more than {_PATTERN_CHARACTERS:,} characters; use shorter ones")
    return tuple(map(_pattern, value))


def _pattern(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{as_json(value)} is not a string")
    if len(value) > _PATTERN_CHARACTERS:
        raise ValueError(f"it has more than {_PATTERN_CHARACTERS:,} characters; use a shorter one")
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as wrong:
        raise ValueError(f"{as_json(value)} does not compile: {wrong}") from None
    return value


def _dimensions(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise ValueError
    for pattern, dim in value.items():
        _pattern(pattern)
        if isinstance(dim, bool) or not isinstance(dim, int) or not -32 <= dim < 32:
            raise ValueError(f"{as_json(pattern)}: {as_json(dim)} is not the number of a dimension")
    return dict(value)


def _objects(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"write [{as_json(value)}]" if isinstance(value, Mapping) else "")
    for item in value:
        if not isinstance(item, Mapping) or not all(isinstance(key, str) for key in item):
            raise ValueError(f"{as_json(item)} is not an object of names and values")
    return tuple(map(dict, value))


def _positives(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    return tuple(map(POSITIVE.parse, value))


Dtype = Literal["fp32", "fp16", "bf16"]
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_SPELLINGS = _DTYPES | {f"torch.{name}": dtype for name, dtype in _DTYPES.items()}

OffloadDevice = Literal["none", "cpu"]


def _offload_device(value: object) -> str:
    if isinstance(value, str) and value.lower() == "nvme":
        raise ValueError(
            'nothing is kept on NVMe; write "cpu": masters and optimizer state take 12 bytes per parameter under Adam'
        )
    return one_of(get_args(OffloadDevice), none="none").parse(value)


OFFLOAD_DEVICE = Kind('"none" or "cpu"', _offload_device)
DTYPE = one_of(get_args(Dtype), _SPELLINGS, none="fp32")
DTYPE_OR_NULL = one_of(get_args(Dtype), _SPELLINGS, none=None)
FLAG = Kind("true or false", _flag)
TEXT = Kind("a string", _text)
TEXT_OR_NULL = or_null(TEXT)
COUNT = number(0, whole=True)
POSITIVE = number(1, whole=True)
COUNT_OR_FALSE = Kind("a non-negative integer or false", lambda value: 0 if value is False else COUNT.parse(value))
COUNT32 = Kind(f"a non-negative integer up to {2**31 - 1}", number(0, most=2**31 - 1, whole=True).parse)
POSITIVE32 = Kind(f"a positive integer up to {2**31 - 1}", number(1, most=2**31 - 1, whole=True).parse)
INT32 = number(1, most=2**31 - 1, whole=True)
POSITIVE_OR_NULL = or_null(POSITIVE)
INT32_OR_NULL = or_null(POSITIVE32)
INT32_OR_REST = Kind(f"-1 or {POSITIVE32.allowed}", lambda value: -1 if value == -1 else INT32.parse(value))
# jax.random.key drops higher bits: 2**32 + 7 would be the seed 7.
SEED = Kind(f"a non-negative integer up to {2**32 - 1}", number(0, most=2**32 - 1, whole=True).parse)
EVERY = Kind("a positive integer, Infinity (never) or null", _every)
NON_NEGATIVE = number(0)
# true is the norm 1.0 in people's files: in DeepSpeed's Python it is the number 1
CLIP = Kind(
    "a non-negative number, true (1.0) or false (0, off)",
    lambda x: NON_NEGATIVE.parse(float(x) if isinstance(x, bool) else x),
)
NON_NEGATIVE32 = number(0, float32=True)
FRACTION = number(0, below=1)
STAGE = Kind("0, 1, 2 or 3", number(0, most=3, whole=True).parse)
FLAG_OR_NULL = Kind("true, false or null", lambda value: None if value is None else FLAG.parse(value))
FLAG_OR_AUTO = Kind('true, false or "auto"', lambda value: value if value == "auto" else FLAG.parse(value))
NAME_LIST = instance("a list of names", list, tuple)
PATTERNS = Kind("a list of regular expressions", _patterns)
PATTERNS_OR_NULL = or_null(PATTERNS)
PATTERN = Kind("a regular expression", _pattern)
DIMENSIONS = Kind("an object of regular expressions and dimensions", _dimensions)
POSITIVES_OR_NULL = or_null(Kind("a list of positive integers", _positives))
PARAM_LIST = Kind("a list of objects of names and values", _objects)
PARAMS = instance("an object of names and values", dict)
OPTIONS = Kind("an object of XLA option names and values", _options)
