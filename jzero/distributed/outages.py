"""Outages: how earlier attempts of a job ended; the launcher tells the processes of the next one, for their ledger."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VARIABLE = "JZERO_OUTAGES"
MOST = 20  # outages that a variable holds: each has a line of text
LONGEST = 500  # characters of a reason


class Outage(NamedTuple):
    """The end of an attempt.

    Attributes:
      attempt: the JZERO_ATTEMPT of its processes.
      died: the last sign of life, in UTC seconds: the end of a process, the last step before a hang.
      noticed: when the launcher ended the attempt, in UTC seconds.
      code, reason: the exit code, and why in one line.
    """

    attempt: str
    died: float
    noticed: float
    code: int
    reason: str


def pack(outages: Sequence[Outage]) -> dict[str, str]:
    """Return the variable for the next attempt.

    >>> read(pack([Outage("a 0", 1.0, 2.5, 1, "rank 0 exited with code 1")]))
    [Outage(attempt='a 0', died=1.0, noticed=2.5, code=1, reason='rank 0 exited with code 1')]
    """
    shortened = [outage._replace(reason=outage.reason[:LONGEST]) for outage in outages[-MOST:]]
    return {VARIABLE: json.dumps(shortened)} if outages else {}


def read(env: Mapping[str, str]) -> list[Outage]:
    """Read the outages before this attempt, the oldest first; none from a variable that `pack` did not make."""
    with contextlib.suppress(ValueError, TypeError):
        return [
            Outage(str(attempt), float(died), float(noticed), int(code), str(reason))
            for attempt, died, noticed, code, reason in json.loads(env.get(VARIABLE, "[]"))
        ]
    return []
