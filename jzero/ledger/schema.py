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
| `notice` | a check found something about a step (`jzero.diagnosis`): `step`, `what` ("not finite", "spike", "replicas differ", "straggler"), `text` |
| `end` | the process ends in order: `step`, `reason` ("" if the script ended) |

A reader skips lines that are no record (a kill may tear the last one) and kinds and fields that it does not know. A
`state` supersedes the steps after it that came before; a `start` that is `new` supersedes everything.
"""  # noqa: E501  # the table

from __future__ import annotations

FILE = "ledger.jsonl"
VERSION = 1

FAILURE, START, STATE, STEP, EVALUATION, SAVE, NOTICE, END = (
    "failure", "start", "state", "step", "evaluation", "save", "notice", "end",
)  # fmt: skip
