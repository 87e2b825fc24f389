"""What the devices have finished: the newest step, and the totals after each of the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from jzero.batch import Amount

WINDOW = 50  # steps over which a speed is measured


class Totals(NamedTuple):
    """What the devices have finished: steps, samples, tokens (None: unknown), skipped steps; and when."""

    steps: int = 0
    samples: int = 0
    tokens: int | None = 0
    skipped: int = 0
    time: float = 0.0


class Finished:
    """The steps that the devices have finished.

    Attributes:
      number, metrics: of the newest one; 0 and {} before the first.
      recent: the totals after each of the last steps; its last item is the newest.
    """

    def __init__(self) -> None:
        self.number, self.metrics = 0, dict[str, float]()
        self.recent = deque[Totals](maxlen=WINDOW + 1)

    @property
    def totals(self) -> Totals:
        return self.recent[-1] if self.recent else Totals()

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the last steps, at most `WINDOW`; None before two have finished."""
        if len(self.recent) < 2:
            return None
        return (self.recent[-1].time - self.recent[0].time) / (len(self.recent) - 1)

    def add(self, number: int, amount: Amount, metrics: Mapping[str, float], time: float) -> None:
        """Take a step that the devices finished at a time by `time.perf_counter`, with what its batch held."""
        before = self.totals
        tokens = None if before.tokens is None or amount.tokens is None else before.tokens + amount.tokens
        skipped = before.skipped + int(metrics.get("skipped", 0.0))
        self.number, self.metrics = number, dict(metrics)
        self.recent.append(Totals(before.steps + 1, before.samples + amount.samples, tokens, skipped, time))
