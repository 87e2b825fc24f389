"""The records of a ledger, version 1: DIR/ledger.jsonl, a JSON object per line, appended in the order of the events.

Every record has `kind` and `time`. Times are UTC seconds since 1970, other durations are seconds, sizes are bytes.
Metrics that are not finite are the strings "nan", "inf" and "-inf", since JSON has no such numbers.
A position in the data is [epoch, samples], inside of a global batch [epoch, samples, begun].

| kind | further fields |
|---|---|
| `failure` | of an earlier attempt, as the launcher saw it: `attempt`, `died` (the last sign of life), `code`, `reason`; `time` is when the launcher noticed. Each later attempt may repeat the record |
| `start` | a process 0 begins: `version` of the records, `began` (the call of `initialize`), `new` (a run of its own: neither resumed nor restarted), `attempt`, `processes`, `devices`, `device`, `mesh`, `versions`, `precision` |
| `state` | a state is there, and steps continue after it: `step`, `samples`, `from` (a checkpoint's path; "before step N": back from a step that was not finite; null for a new state), `data` (the position), `order` (what the position depends on) |
| `step` | `step`, `samples` (in all), `rows` (of this step), `began` (given to the devices; `time`: computed), `metrics`; where they are not 0 or unknown: `tokens` (of this step), `data` (the positions before and after), `compile` (seconds after `began`), `compile_before`, `save`, `evaluation`, `wait` (seconds before `began` in which the devices waited for compilation, saves, evaluations and data), `peak` (memory of the fullest device of process 0) |
| `evaluation` | `step`, `samples`, `began`, `metrics` |
| `save` | a save has ended: `tag`, `directory`, `step`, `began`, `stall` (seconds that the script waited), `background` (seconds of the writing thread), `bytes`, `error` or null |
| `notice` | a check found something about a step (`jzero.run.diagnosis`): `step`, `what` ("not finite", "spike", "replicas differ", "straggler"), `text` |
| `end` | the process ends in order: `step`, `reason` ("" if the script ended) |

A reader skips lines that are no record (a kill may tear the last one) and kinds and fields that it does not know. A
`state` supersedes the steps after it that came before; a `start` that is `new` supersedes everything.
"""  # noqa: E501  # the table

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FILE = "ledger.jsonl"
VERSION = 1

FAILURE, START, STATE, STEP, EVALUATION, SAVE, NOTICE, END = (
    "failure", "start", "state", "step", "evaluation", "save", "notice", "end",
)  # fmt: skip

_NEEDED = {
    FAILURE: {"time", "attempt", "died", "code", "reason"},
    START: {"time", "began", "new"},
    STATE: {"time", "step", "samples", "from"},
    STEP: {"time", "step", "samples", "rows", "began", "metrics"},
    EVALUATION: {"time", "step", "samples", "began", "metrics"},
    SAVE: {"time", "tag", "step", "began", "stall", "background", "bytes"},
    NOTICE: {"time", "step", "what", "text"},
    END: {"time", "step", "reason"},
}


def is_record(x: dict[str, Any]) -> bool:
    """Return whether an object is a record: of a kind that is known here, with its fields, and of their types."""
    kind = x.get("kind")
    if type(kind) is not str or not _NEEDED.get(kind, {""}) <= x.keys():
        return False
    return all(_TYPES[field](value) for field, value in x.items() if field in _TYPES)


def is_count(x: Any) -> bool:
    """Return whether a value is a number of things."""
    return type(x) is int and 0 <= x < 2**63


def is_metric(x: Any) -> bool:
    """Return whether a value is a number, finite or not."""
    return type(x) is float or (type(x) is int and abs(x) < 2**63)


LATEST = 1e12  # seconds of a time


def _is_time(x: Any) -> bool:
    return (type(x) is float or type(x) is int) and -LATEST < x < LATEST


def _is_position(x: Any) -> bool:
    return x is None or (type(x) is list and len(x) in (2, 3) and all(map(is_count, x)))


def _is_data(x: Any) -> bool:
    """Return whether a value is a position, or those before and after a step."""
    is_pair = type(x) is list and len(x) == 2 and type(x[1]) is not int
    return _is_position(x[0]) and _is_position(x[1]) if is_pair else _is_position(x)


def _is_order(x: Any) -> bool:
    own = isinstance(x, dict) and {"samples", "seed", "drop_last"} <= x.keys()
    return x is None or (own and all(x[key] is None or is_count(x[key]) for key in ("samples", "seed")))


# A reader calculates with these; a record with a value of another type is none.
_TYPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "samples", "rows", "tokens", "peak", "bytes", "devices"), is_count),
    **dict.fromkeys(("time", "began", "died", "stall", "background"), _is_time),
    **dict.fromkeys(("compile", "compile_before", "save", "evaluation", "wait"), _is_time),
    **dict.fromkeys(("attempt", "reason", "tag", "what", "text", "device"), lambda x: type(x) is str),
    "from": lambda x: x is None or type(x) is str,
    "metrics": lambda x: type(x) is dict and (set(map(type, x.values())) <= {float} or all(map(is_metric, x.values()))),
    "mesh": lambda x: type(x) is dict and all(map(is_count, x.values())),
    "data": _is_data,
    "order": _is_order,
}
