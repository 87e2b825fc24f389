"""What JAX has spent on compiling in this process, and what its cache spared, by JAX's own events."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

EVENTS = "/jax/core/compile/"  # tracing, lowering, and XLA's compilation or what JAX's cache has instead

CACHE_HIT = "/jax/compilation_cache/cache_hits"

_seconds = 0.0
_cached = 0


class _Counted(threading.local):
    """The time of this thread that is counted: (begin, end) of its events in order, by `time.perf_counter`."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []


_counted = _Counted()


def seconds() -> float:
    """Return the seconds spent on tracing, lowering and compiling so far, each once where they contain another."""
    return _seconds


def cached() -> int:
    """Return the number of programs that came from JAX's persistent cache so far."""
    return _cached


def _count(event: str, **_: Any) -> None:
    global _cached
    _cached += event == CACHE_HIT


def _add(event: str, duration_secs: float, **_: Any) -> None:
    global _seconds
    if not event.startswith(EVENTS):
        return
    end = time.perf_counter()
    begin, spans = end - duration_secs, _counted.spans
    while spans and spans[-1][1] > begin:  # a constant that was computed while this one traced
        inner_begin, inner_end = spans.pop()
        duration_secs -= inner_end - max(begin, inner_begin)
    spans.append((begin, end))
    _seconds += duration_secs


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_add)
