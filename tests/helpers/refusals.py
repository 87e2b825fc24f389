"""Asserts that a mistake is refused, also before anything compiles."""

import re

import jax
import pytest

import jzero

compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if event.endswith("backend_compile_duration") else None
)


def refuses(call, pattern=""):
    """The call is a ConfigError whose text matches the pattern; return the text."""
    try:
        with pytest.raises(jzero.ConfigError, match=pattern or None) as error:
            call()
    except BaseException as other:  # which of many rows it is
        other.add_note(f"expected: {pattern}")
        raise
    return str(error.value)


def says(call, *parts):
    """The call is a ConfigError with these parts in its text; return the text."""
    text = refuses(call, re.escape(parts[0]) if parts else "")
    assert [part for part in parts if part not in text] == [], text
    return text


def refused(call, *parts):
    """The same, and it compiles nothing."""
    jax.random.key(0)  # compiles a program of its own, the first time
    compilations.clear()
    says(call, *parts)
    assert compilations == []
