"""The values of what is profiled: collectives by DeepSpeed's names, and steps."""

from typing import Any

from jzero.values.kinds import INT32, Kind, either

# DeepSpeed's name of an operation -> its kind in a compiled program.
_KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "collective-permute",
    "recv": "collective-permute",
    "broadcast": "collective-broadcast",
}


def _collectives(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("")
    for name in value:
        if name not in _KINDS:
            raise ValueError(f"{name!r} is unknown")
    return tuple(dict.fromkeys(_KINDS[name] for name in value))


def _steps(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("")
    first, last = (INT32.parse(number) for number in value)
    if last < first:
        raise ValueError("the last is before the first")
    return first, last


COLLECTIVES = Kind(f"a list of {either(_KINDS)}", _collectives)
STEPS = Kind("a list of the first and the last step, as [10, 12], or null", _steps)
