"""The checks that an engine runs alongside its steps: each reads a step once the next one was given, so none waits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jzero.checkpoint.checksums import checksums
from jzero.errors import some_of
from jzero.events import Noticed
from jzero.loss import LOSS
from jzero.loss_scale import NonFiniteError
from jzero.run.diagnosis.non_finite_search import by_part, device_name, on_each_device
from jzero.run.diagnosis.stragglers import Stragglers
from jzero.run.diagnosis.watch import Taken, Watch, WatchedRun
from jzero.run.observers import Observers
from jzero.step.programs import Details
from jzero.step.train_step import Metrics, TrainStep
from jzero.step.update import SkipWhen
from jzero.tree import named


class Checks:
    """Watches the steps of one engine: whether they are finite or spike, whether replicas agree, and who is late.

    A check's `take` gets a step that the devices may still compute. It returns a function that reads the results once
    the next step was given (None: nothing is to be read), and returns the step if the run stops for it.
    """

    def __init__(self, step: TrainStep, observers: Observers):
        self._finite, self._spikes = Watch(step, observers), Spikes(step, observers)
        self._replicas, self._stragglers = Replicas(step, observers), Stragglers(step, observers)
        others = (self._spikes, self._replicas, self._stragglers)
        self._all = [self._finite, *(check for check in others if check.is_on)]
        self._reads: list[Callable[[], Taken | None] | None] = []  # of the last step, by each check

    def begin(self, run: WatchedRun) -> SkipWhen:
        """Return the conditions of the next step."""
        return SkipWhen(self._finite.begin(run), self._spikes.begin() if self._spikes.is_on else None)

    def finish(self, run: WatchedRun, metrics: Metrics, details: Details) -> Taken | None:
        """Take a step that was given to the devices, and read what was computed about the one before it.

        Returns:
          The step before, if it was not finite and the run stops for it.
        """
        earlier, self._reads = self._reads, []  # an error forgets both steps
        reads = [check.take(run, metrics, details) for check in self._all]
        for read in earlier:
            if read is not None and (stopped := read()):
                return stopped
        self._reads = reads
        return None

    def settle(self) -> Taken | None:
        """Report what was found about the last step, before its state is saved; return it if the run stops for it."""
        for i, check in reversed(list(enumerate(self._all[: len(self._reads)]))):  # the one that may stop comes last
            if check is self._replicas or (check is self._finite and self._finite.stops):
                read, self._reads[i] = self._reads[i], None
                if read is not None and (stopped := read()):
                    return stopped
        return None

    def explain(self, run: WatchedRun, step: Taken) -> NonFiniteError:
        """Search a step that stopped the run; see `Watch.explain`."""
        return self._finite.explain(run, step)

    def restart(self) -> None:
        """Forget the last step: the state was replaced."""
        self._reads = []
        self._finite.restart()
        self._stragglers.restart()


NORM, SPIKE = "grad_norm", "spike"
LEAST = 20  # steps, or half of the window if that is more, before the first limit
FLOOR = 0.01  # of the median: the least deviation, for a run whose values hardly change
MOST_LINES = 50  # of one run


class Spikes:
    """Looks for spikes, steps far above the last ones; with the action "skip", such steps change nothing.

    The rule is Hampel's identifier: a value is a spike if it exceeds the median of the last values by `threshold`
    standard deviations, where 1.4826 times the median absolute deviation (MAD) stands for one (Hampel, 1974, "The
    influence curve and its role in robust estimation"). Spikes in the window do not raise that limit, as they raise a
    mean and a deviation. Window, threshold and the number of steps before the first limit are those of OLMo-core's
    SkipStepOptimizer, which skips such updates (olmo_core/optim/skip_step_optimizer.py).

    Limits are computed on the host, from steps that have finished, and are an input of the next step: the device
    decides whether it is skipped, and nothing waits.
    """

    def __init__(self, step: TrainStep, observers: Observers):
        section, self._observers = step.config.spikes, observers
        self._skips, self.is_on = section.action == "skip", section.action != "ignore"
        self._window, self._threshold = section.window, section.threshold
        self._values = tuple(deque[float](maxlen=self._window) for _ in range(2))
        self._limits, self._lines = np.full(2, np.inf, np.float32), 0

    def begin(self) -> np.ndarray | None:
        """Return the largest loss and gradient norm of the next step, if it is skipped above them; else None."""
        return self._limits if self._skips else None

    def take(self, run: WatchedRun, metrics: Metrics, details: Details) -> Callable[[], None]:
        """Keep a step, with the limits that it got."""
        return partial(self._read, run.global_steps, metrics, self._limits)

    def _read(self, number: int, metrics: Metrics, limits: np.ndarray) -> None:
        """Look at a step, and compute the limits of the step after the next."""
        pair = jax.device_get((metrics[LOSS], metrics[NORM]))
        if not all(map(math.isfinite, pair)):
            return
        high = [
            f"{name} {value:.4g} (limit {most:.4g}, median {np.median(values):.4g})"
            for name, value, most, values in zip(("loss", "gradient norm"), pair, limits, self._values, strict=True)
            if value > most
        ]
        # Spikes count too: should the run stay on a higher level, that becomes the median.
        for values, value in zip(self._values, pair, strict=True):
            values.append(float(value))
        if high and self._lines < MOST_LINES:
            self._lines += 1
            effect = ", the step changed nothing" if self._skips else ""
            self._observers.emit(Noticed(number, SPIKE, f"{SPIKE}: {', '.join(high)}{effect}"))
        if len(self._values[0]) >= max(LEAST, self._window // 2):
            self._limits = np.array([spike_threshold(values, self._threshold) for values in self._values], np.float32)


def spike_threshold(values: Sequence[float], threshold: float) -> float:
    """Compute the largest value that is no spike after these.

    >>> spike_threshold([1.0, 2.0, 3.0, 4.0, 100.0], 6.0)
    11.8956
    """
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(values) - median)))
    return median + threshold * max(deviation, FLOOR * abs(median))


DIFFER = "replicas differ"
MOST_LEAVES = 5  # in a report


class Replicas:
    """Compares the copies of a run's state every `desync_check.every` steps.

    Every device adds up the bits of its own copies, and those of one part are compared. Nothing in a step compares
    them. A bit that flipped in one device's memory, or a process that computed another update, stays in that replica's
    parameters and reaches the others as a gradient of another model.

    The checksums are read one step later, so that no step waits, or before a save.
    """

    def __init__(self, step: TrainStep, observers: Observers):
        self._step, self._every, self._observers = step, step.config.desync_check.every or 0, observers
        self.is_on = self._every > 0

    def take(self, run: WatchedRun, metrics: Metrics, details: Details) -> Callable[[], None] | None:
        """Take the checksums of the state after a step, if a comparison is due."""
        due = run.global_steps % self._every == 0
        return partial(self._read, run.global_steps, self.sums(run.state)) if due else None

    def _read(self, number: int, sums: jax.Array) -> None:
        """Report the copies that differed when checksums were taken."""
        if found := self.differing(np.asarray(sums)):
            self._observers.emit(Noticed(number, DIFFER, f"{DIFFER}: {some_of(found, MOST_LEAVES)}"))

    @cached_property
    def sums(self) -> Any:
        """The program: a state -> the checksum of each leaf's part on each device, uint32 [devices, leaves]."""
        return on_each_device(self._step.setup, lambda state: checksums(named(state)), self._step.state_specs)

    def differing(self, sums: np.ndarray) -> list[str]:
        """Describe each leaf whose copies differ; `sums` as the program returns it."""
        devices = list(self._step.mesh.devices.flat)
        shapes, shardings = named(self._step.state_shapes), named(self._step.state_shardings)
        found = []
        for column, name in enumerate(sorted(shapes)):
            parts = by_part(devices, shardings[name], shapes[name].shape)
            odd = sorted(n for _, holders in parts for n in odd_ones(holders, sums[:, column]))
            if odd:
                found.append(f"{name} on {some_of(device_name(devices, n) for n in odd)}")
        return found


def odd_ones(holders: list[int], sums: np.ndarray) -> list[int]:
    """List the devices whose sum is not that of the majority of the holders; without a majority, all of them.

    >>> odd_ones([0, 1, 3], np.array([7, 7, 0, 8])), odd_ones([0, 3], np.array([7, 7, 0, 8]))
    ([3], [0, 3])
    """
    values, counts = np.unique(sums[holders], return_counts=True)
    if len(values) == 1:
        return []
    usual = values[counts.argmax()] if 2 * counts.max() > len(holders) else None
    return [n for n in holders if usual is None or sums[n] != usual]
