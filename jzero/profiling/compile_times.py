"""The time that JAX has spent on compiling in this process, by its own events."""

from __future__ import annotations

from typing import Any

import jax

EVENTS = "/jax/core/compile/"  # tracing, lowering, and XLA's compilation or what JAX's cache has instead

_seconds = 0.0


def seconds() -> float:
    """Return the seconds spent on tracing, lowering and compiling so far."""
    return _seconds


def _add(event: str, duration_secs: float, **_: Any) -> None:
    global _seconds
    if event.startswith(EVENTS):
        _seconds += duration_secs


jax.monitoring.register_event_duration_secs_listener(_add)
