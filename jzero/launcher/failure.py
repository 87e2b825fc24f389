"""Say which ranks failed or hang and why, from the lines they print, the steps they count and their exit codes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jzero.distributed.last_words import CONFIG, UNAVAILABLE


class Failure(NamedTuple):
    """The reason for which an attempt ends.

    Attributes:
      died, noticed: the last sign of life before it, and its notice, in UTC seconds.
      rank: the rank whose end it is.
    """

    code: int
    what: str
    died: float
    noticed: float
    rank: int | None


class RankSteps(NamedTuple):
    """The steps of a rank (-1: it does not count them) and the state of its process, as in /proc/PID/stat."""

    finished: int = -1
    begun: int = -1
    state: str = "?"


class Progress:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._steps = clock, dict[int, RankSteps]()
        self.begin()

    def begin(self) -> None:
        """Count the time without a finished step from now on."""
        self._moved = self._clock()

    def note(self, status: Mapping[str, Sequence[int | str]]) -> None:
        for name, values in status.items():
            steps = RankSteps(*values)  # type: ignore[arg-type]
            if steps.finished > self._steps.get(int(name), RankSteps()).finished:
                self.begin()
            self._steps[int(name)] = steps

    def most(self) -> int:
        """Return the most steps that a rank has finished; -1: none counts them."""
        return max((steps.finished for steps in self._steps.values()), default=-1)

    def still(self) -> float:
        """Return the seconds since a step last finished."""
        return self._clock() - self._moved

    def hung(self, ranks: Iterable[int], limit: float) -> str:
        """Describe a hang of these ranks; "" if a step has finished within `limit` seconds, or none counts steps.

        The ranks to look at are stopped, or have begun the fewest steps.
        """
        steps = {rank: self._steps.get(rank, RankSteps()) for rank in sorted(ranks)}
        counting = {rank: one for rank, one in steps.items() if one.finished >= 0}
        if not counting or self.still() <= limit:
            return ""
        stopped = [rank for rank, one in counting.items() if one.state in "Tt"]
        fewest = min(one.begun for one in counting.values())
        behind = stopped or [rank for rank, one in counting.items() if one.begun == fewest]
        each = ", ".join(
            f"rank {rank} {one.finished} of {one.begun}{' (stopped)' * (rank in stopped)}"
            for rank, one in counting.items()
        )
        return (
            f"no step has finished for {limit:g} s; steps finished of those begun: {each}; look at rank "
            f"{listed(behind)} first (stacks above)"
        )


def first_failure(rank: int, host: str, code: int, seconds: float, lines: Sequence[str]) -> str:
    """Describe the end of the rank that failed first, `seconds` after the start, with its last lines.

    Args:
      host: "" if there is only one.
    """
    last = _config_error(lines) if code in (CONFIG, UNAVAILABLE) else ""
    last = last or "; its last lines:" + ("".join(f"\n    {line}" for line in lines) or " none")
    if any("unrecognized arguments: --local_rank" in line for line in lines):
        last += (
            "\n  the script has no option --local_rank: call jzero.add_config_arguments(parser), or pass "
            "--no_local_rank before the script"
        )
    return f"rank {rank}{f' on {host}' if host else ''} {ended(code)} first, after {seconds:.0f} s{last}"


def _config_error(lines: Iterable[str]) -> str:
    """Return the ConfigError that ended a process, as last_words.py printed it; "" if there is none."""
    found = ""
    for line in lines:
        if line.startswith("jzero: "):
            found = line.replace("jzero", "", 1)
        elif found and line.startswith("- "):
            found += f"\n{line}"
    return found


def listed(ranks: Iterable[int]) -> str:
    """List ranks in their order.

    >>> listed({10, 2})
    '2, 10'
    """
    return ", ".join(map(str, sorted(ranks)))


def ended(code: int) -> str:
    """Say how a process ended.

    >>> ended(3), ended(-9)
    ('exited with code 3', 'was killed by signal 9 (SIGKILL)')
    """
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def signal_name(number: int) -> str:
    """Return a signal's number and name; the number alone for a real-time signal, which has no name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
