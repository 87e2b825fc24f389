"""A search as text: what was compiled, the fastest first, and the winner's JSON lines."""

from __future__ import annotations

import json
from typing import Any

from jzero.config.sizes import ACCUM, MICRO
from jzero.display.table import table
from jzero.planner import choices as keys
from jzero.planner.choices import Choice, merged, value_at
from jzero.planner.gpus import gpu
from jzero.planner.outcomes import Outcome, Task
from jzero.planner.planned_memory import verdict
from jzero.planner.search import EQUAL, LATE, Search
from jzero.values.sizes import size_text

SHOWN = 12  # configurations
COLUMNS = ["", "tokens/s per GPU", "step", "peak", "left", "configuration"]


def label(raw: dict[str, Any], choice: Choice) -> str:
    """Describe a choice in the field's words; `raw` has what the config keeps.

    >>> label({"zero_optimization": {"stage": 2}}, {"mesh.zero": 8, MICRO: 2, ACCUM: 4})
    'ZeRO-2, zero 8, micro-batch 2 x 4, policy none'
    """

    def value(key: str) -> Any:
        return choice.get(key, value_at(raw, key))

    words = [f"ZeRO-{value(keys.STAGE) or 0}"]
    axes = (("pipe", keys.PIPE), ("data", keys.DATA), ("zero", keys.ZERO))
    words += [f"{axis} {value(key)}" for axis, key in axes if (value(key) or 1) > 1]
    words += [f"micro-batch {value(MICRO)} x {value(ACCUM)}"]
    if (value(keys.PIPE) or 1) > 1:
        chunks = value(keys.CHUNKS) or 1
        words += [f"{value(keys.SCHEDULE) or '1f1b'}{f' of {chunks} chunks' if chunks > 1 else ''}"]
    words += [f"policy {value(keys.POLICY) or 'none'}"]
    words += ["stack.unroll false"] if value(keys.UNROLL) is False else []
    words += ["offload_optimizer"] if value(keys.OFFLOAD_OPTIMIZER) == "cpu" else []
    words += ["offload_param"] if value(keys.OFFLOAD_PARAM) == "cpu" else []
    return ", ".join(words)


def row(raw: dict[str, Any], found: Outcome, fastest: Outcome | None = None) -> list[str]:
    """Return the cells of one configuration; "=" marks one that is as fast as the fastest, as far as estimates tell."""
    mark = ""
    if fastest and found.step_s and fastest.step_s and found.step_s <= (1 + EQUAL) * fastest.step_s:
        mark = "1" if found is fastest else "="
    left = size_text(found.margin_bytes) if found.fits else f"-{size_text(-found.margin_bytes)}"
    speed = f"{found.tokens_per_s_gpu:,.0f}" if found.tokens_per_s_gpu else "-"
    step = f"{1000 * found.step_s:,.0f} ms" if found.step_s else "-"
    return [mark, speed, step, size_text(found.peak_bytes), left, label(raw, found.choice)]


def progress(raw: dict[str, Any], found: Outcome) -> str:
    """Return the line about a configuration that was just compiled."""
    if not found.peak_bytes:
        return f"not compiled: {label(raw, found.choice)}: {found.problem}"
    _, speed, step, peak, left, name = row(raw, found)
    what = f"{step}, {speed} tokens/s per GPU" if found.fits else "does not fit"
    return f"{what}, peak {peak}, {left} left: {name}"


def search_text(found: Search) -> str:
    """Return the table, what was not compiled, and the fastest configuration's lines.

    Raises:
      ConfigError: nothing fits.
    """
    best, task, raw = found.best, found.task, dict(found.raw)
    compiled = [one for one in found.outcomes if one.peak_bytes]
    title = (
        f"{task.model}, {task.sequence} tokens a row, on {task.gpus} x {gpu(task.gpu).description}: {len(compiled)} "
        f"configurations compiled in {found.seconds:.0f} s, ±{best.uncertainty:.0%}"
    )
    drawn = table(title, COLUMNS, [row(raw, one, best) for one in compiled[:SHOWN]], left=["", "configuration"])
    parts = [drawn, f'"=": as fast as the first, as far as the estimate tells ({EQUAL:.0%})']
    if found.dropped:
        parts.append("not compiled: " + ", ".join(f"{count} ({why})" for why, count in found.dropped.items()))
    untried = found.dropped.get(LATE, 0)
    which = f"the fastest of {len(compiled)}; --minutes left {untried} untried" if untried else "the fastest"
    return "\n".join([*parts, *needs(task, best), "", f"{which}, as lines of the config:", changes(best.choice)])


def needs(task: Task, found: Outcome) -> list[str]:
    """Return the lines about what a configuration needs of its GPUs and hosts."""
    room = gpu(task.gpu).room(task.gpus)
    host = f"needs {size_text(found.host_bytes)} of pinned host memory for each GPU"
    return [verdict(found.peak_bytes, room), *[host] * bool(found.host_bytes)]


def changes(choice: Choice) -> str:
    """Write a choice as the JSON that has to be in the config."""
    return json.dumps(merged({}, choice), indent=2)
