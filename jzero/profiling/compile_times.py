"""Counts the seconds that JAX spends on compiling in this process, and the programs that its cache spares."""

from __future__ import annotations

import threading
import time

import jax

EVENTS = "/jax/core/compile/"  # tracing, lowering, and XLA's compilation or what JAX's cache has instead

CACHE_HIT = "/jax/compilation_cache/cache_hits"

_seconds = 0.0
_cached = 0


_counted = threading.local()  # spans: [(begin, end)] of this thread's events that are counted, by `time.perf_counter`


def seconds() -> float:
    """Return the seconds spent on tracing, lowering and compiling so far, each once where they contain another."""
    return _seconds


def cached() -> int:
    """Return the number of programs that came from JAX's persistent cache so far."""
    return _cached


def _count(event: str, **_: object) -> None:
    global _cached
    _cached += event == CACHE_HIT


def _add(event: str, duration_secs: float, **_: object) -> None:
    global _seconds
    if not event.startswith(EVENTS):
        return
    end = time.perf_counter()
    begin, spans = end - duration_secs, vars(_counted).setdefault("spans", [])
    while spans and spans[-1][1] > begin:  # a constant that was computed while this one traced
        inner_begin, inner_end = spans.pop()
        duration_secs -= inner_end - max(begin, inner_begin)
    spans.append((begin, end))
    _seconds += duration_secs


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_add)
