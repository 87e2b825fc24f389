"""The checks that an engine runs alongside its steps: each reads a step once the next one was given, so none waits."""

from __future__ import annotations

from typing import Any

from jzero.run.diagnosis.replica_check import Replicas
from jzero.run.diagnosis.spikes import Spikes
from jzero.run.diagnosis.stragglers import Stragglers
from jzero.run.diagnosis.watch import Stream, Watch, WatchedRun
from jzero.step.programs import Details
from jzero.step.train_step import Metrics, TrainStep
from jzero.step.update import SkipWhen


class Checks:
    """Watches the steps of one engine: whether they are finite or spike, whether replicas agree, and who is late.

    A check has `take`, which returns what it keeps of a step that the devices may still compute (None: nothing), and
    `read`, which looks at what it kept.
    """

    def __init__(self, step: TrainStep, stream: Stream):
        self._finite, self._spikes = Watch(step, stream), Spikes(step, stream)
        self._replicas, self._stragglers = Replicas(step, stream), Stragglers(step, stream)
        others = (self._spikes, self._replicas, self._stragglers)
        self._all = [self._finite, *(check for check in others if check.is_on)]
        self._kept: list[Any] = []  # of the last step, by each check

    def begin(self, run: WatchedRun) -> SkipWhen:
        """Return the conditions of the next step."""
        return SkipWhen(self._finite.begin(run), self._spikes.begin() if self._spikes.is_on else None)

    def finish(self, run: WatchedRun, metrics: Metrics, details: Details) -> None:
        """Take a step that was given to the devices, and read what was computed about the one before it.

        Raises:
          NonFiniteError: the step before was not finite, and the run stops for it.
        """
        earlier, self._kept = self._kept, []  # an error forgets both steps
        taken = [check.take(run, metrics, details) for check in self._all]
        for check, kept in zip(self._all, earlier, strict=False):  # of the first step there is none
            if kept is not None:
                check.read(run, kept)
        self._kept = taken

    def settle(self, run: WatchedRun) -> None:
        """Report what was found about the last step, or stop for it, before its state is saved."""
        for i, check in reversed(list(enumerate(self._all[: len(self._kept)]))):  # the one that may stop comes last
            if check is self._replicas or (check is self._finite and self._finite.stops):
                kept, self._kept[i] = self._kept[i], None
                if kept is not None:
                    check.read(run, kept)

    def restart(self) -> None:
        """Forget the last step: the state was replaced."""
        self._kept = []
        self._finite.restart()
        self._stragglers.restart()
