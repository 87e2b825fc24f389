"""Lines of JSON that every parser reads: standard JSON has no NaN and no infinity, so strings stand for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

_NOT_FINITE = {str(x): x for x in (math.nan, math.inf, -math.inf)}


def encode(record: Mapping[str, object]) -> str:
    """Write an object as a line; floats that are not finite become "nan", "inf" and "-inf".

    >>> encode({"step": 3, "metrics": {"loss": math.nan, "lr": 0.5}})
    '{"step": 3, "metrics": {"loss": "nan", "lr": 0.5}}\\n'
    """
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_strings(record), allow_nan=False) + "\n"


def as_objects(lines: list[str]) -> list[dict[str, Any]]:
    """Read the object of each line, of a thousand at once: a long run has millions; leave out lines without one.

    >>> as_objects(['{"step": 3}', '{"step": ', "[3]"])
    [{'step': 3}]
    """
    try:
        found = from_json(f"[{','.join(lines)}]", cache_strings="keys")
    except ValueError:
        found = []
    if len(found) != len(lines):  # a line is torn
        found = [_as_object(line) for line in lines]
    return [x for x in found if isinstance(x, dict) and x]


def _as_object(line: str) -> object:
    try:
        return from_json(line)
    except ValueError:  # also half a surrogate pair, as in names of files that are not UTF-8
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None


def decode_float(x: Any) -> Any:
    """Return the float that a string of `encode` stands for; anything else as it is.

    >>> decode_float("-inf"), decode_float(0.5)
    (-inf, 0.5)
    """
    return _NOT_FINITE.get(x, x) if isinstance(x, str) else x


def _strings(x: object) -> object:
    if isinstance(x, dict):
        return {key: _strings(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_strings(value) for value in x]
    return str(float(x)) if isinstance(x, float) and not math.isfinite(x) else x
