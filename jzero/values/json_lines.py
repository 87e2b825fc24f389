"""Lines of JSON that every parser reads: standard JSON has no NaN and no infinity, so strings stand for them."""

from __future__ import annotations

import json
import math
from typing import Any

_NOT_FINITE = {str(x): x for x in (math.nan, math.inf, -math.inf)}


def encode(record: dict[str, Any]) -> str:
    """Write an object as a line; floats that are not finite become "nan", "inf" and "-inf".

    >>> encode({"step": 3, "metrics": {"loss": math.nan, "lr": 0.5}})
    '{"step": 3, "metrics": {"loss": "nan", "lr": 0.5}}\\n'
    """
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_strings(record), allow_nan=False) + "\n"


def number(x: Any) -> Any:
    """Return the float that a string of `encode` stands for; anything else as it is.

    >>> number("-inf"), number(0.5)
    (-inf, 0.5)
    """
    return _NOT_FINITE.get(x, x) if isinstance(x, str) else x


def _strings(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _strings(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_strings(value) for value in x]
    return str(float(x)) if isinstance(x, float) and not math.isfinite(x) else x
