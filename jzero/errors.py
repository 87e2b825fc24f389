"""The exceptions: a user's mistake, and a checkpoint that cannot be written or read."""

import re
from collections.abc import Iterable


class ConfigError(ValueError):
    """A config, model or call that jzero cannot honour.

    Each problem names the key, its value, what is allowed and the fix; all problems of a config are
    reported together.
    """

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems) if len(problems) == 1 else "\n".join(f"- {p}" for p in problems))


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, is incomplete, or does not hold what was saved."""


def some_of(names: Iterable[object], most: int = 8) -> str:
    """The first names, and how many more there are."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def in_a_line(error: Exception) -> str:
    """What an exception says, without the specifications that tensorstore adds."""
    if type(error) is Exception and isinstance(error.__cause__, Exception):  # Orbax's: all of the specification
        error = error.__cause__
    line = re.split(r" \[[\w ]+='", (str(error).strip().splitlines() or [""])[0])[0][:500]
    plain = type(error) is ValueError or isinstance(error, OSError | RuntimeError)
    return line if line and plain else f"{type(error).__name__}: {line}".removesuffix(": ")
