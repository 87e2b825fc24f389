"""The exceptions, and how to write names and other exceptions into their messages."""

import re
from collections.abc import Iterable


class ConfigError(ValueError):
    """An invalid or unsupported config, model or call.

    Each problem names the key, its value, the allowed values and the fix. All problems of a config are reported
    together.

    >>> print(ConfigError("steps = -1: must be positive", "size = 0: must be positive"))
    - steps = -1: must be positive
    - size = 0: must be positive
    """

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems) if len(problems) == 1 else "\n".join(f"- {p}" for p in problems))


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, is incomplete, or differs from the state that was saved."""


def some_of(names: Iterable[object], most: int = 8) -> str:
    """Join the first names as prose, with the number of the others.

    >>> some_of(range(10), most=3)
    '0, 1, 2 and 7 more'
    """
    listed = [str(name) for name in names]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def in_a_line(error: Exception) -> str:
    """Return an exception's message in one line, without the specifications that TensorStore appends."""
    if type(error) is Exception and isinstance(error.__cause__, Exception):  # Orbax repeats the whole specification
        error = error.__cause__
    line = re.split(r" \[[\w ]+='", (str(error).strip().splitlines() or [""])[0])[0][:500]
    plain = type(error) is ValueError or isinstance(error, OSError | RuntimeError)
    return line if line and plain else f"{type(error).__name__}: {line}".removesuffix(": ")
