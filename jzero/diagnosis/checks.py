"""The checks that an engine runs beside its steps."""

from __future__ import annotations

from jzero.diagnosis.replicas import Replicas
from jzero.diagnosis.spikes import Spikes
from jzero.diagnosis.stragglers import Stragglers
from jzero.diagnosis.watch import Log, Run, Watch
from jzero.programs import Details
from jzero.train_step import Metrics, TrainStep
from jzero.update import Conditions


class Checks:
    """Watches the steps of one engine: whether they are finite or spike, whether replicas agree, and who is late."""

    def __init__(self, step: TrainStep, log: Log):
        self._finite, self._replicas = Watch(step, log), Replicas(step, log)
        self._spikes, self._stragglers = Spikes(step, log), Stragglers(step, log)

    def begin(self, run: Run) -> Conditions:
        """Return the conditions of the next step."""
        return Conditions(self._finite.begin(run), self._spikes.begin())

    def finish(self, run: Run, metrics: Metrics, details: Details) -> None:
        """Take a step that was given to the devices, and read what was computed about the one before it.

        Raises:
          NonFiniteError: the step before was not finite, and the run stops for it.
        """
        self._finite.finish(run, metrics, details)
        self._spikes.finish(run.global_steps, metrics)
        self._replicas.finish(run)
        self._stragglers.finish(run.global_steps)

    def settle(self, run: Run) -> None:
        """Report what was found about the last step, or stop for it, before its state is saved."""
        self._replicas.settle()
        self._finite.settle(run)

    def restart(self) -> None:
        """Forget the last step: the state was replaced."""
        self._finite.restart()
        self._spikes.restart()
        self._replicas.restart()
        self._stragglers.restart()
