"""Watches a run for steps whose loss or gradient is not finite: warns, or stops it and says where they begin.

It reads a step's results once the next step was given to the devices, so that no step waits. A step that is not finite
changes no parameter. Under "stop" the next one does not either: the parameters that it failed with are still there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jzero.data import DataLoader
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import share_problem
from jzero.errors import ConfigError, LostProcessError, in_a_line
from jzero.events import Noticed
from jzero.ledger.read import Step, rows_of
from jzero.loss import LOSS
from jzero.loss_scale import LossScale, NonFiniteError, check_stuck
from jzero.run.diagnosis.non_finite_search import Finding, find_non_finite
from jzero.run.diagnosis.repeat import Repeat
from jzero.run.diagnosis.replay import save_replay
from jzero.run.observers import Observers
from jzero.step.programs import Details
from jzero.step.state import TrainState
from jzero.step.train_step import Metrics, TrainStep

STOP = "stop"
NOT_FINITE = "not finite"
MOST_WARNINGS = 10  # of one run
AGREE = 300.0  # seconds to wait for the other processes' search, which may compile
HINT = 'set "non_finite": {"action": "stop"} to end the run there and find the layer and the rows'


class WatchedRun(Protocol):
    """The part of the engine that checks read: it imports them."""

    state: TrainState
    global_steps: int
    training_dataloader: DataLoader | None


class Mark(NamedTuple):
    """The position of a run between two steps, without its parameters."""

    counters: Mapping[str, int]
    loss_scale: LossScale
    position: Mapping[str, int] | None


class Taken(NamedTuple):
    """A step that the devices may still compute, and where the run was before it and after it."""

    number: int
    metrics: Metrics
    details: Details
    before: Mark | None
    after: Mark | None


class Watch:
    """Watches the steps of one engine."""

    def __init__(self, step: TrainStep, observers: Observers):
        self._step, self._section, self._observers = step, step.config.non_finite, observers
        self.stops = self._section.action == STOP
        self._warnings, self._in_a_row = 0, False
        self.restart()

    def restart(self) -> None:
        """Forget where the run is: the state was replaced."""
        self._mark: Mark | None = None
        self._frozen: jax.Array | None = None
        if self.stops:
            self._frozen = jax.device_put(jnp.zeros((), bool), NamedSharding(self._step.mesh, PartitionSpec()))

    def begin(self, run: WatchedRun) -> jax.Array | None:
        """Return whether the next step is frozen, on the devices; None unless a step may freeze the next."""
        if self._frozen is not None and self._mark is None:
            self._mark = _mark(run, jax.tree.map(jnp.copy, run.state.loss_scale))  # the step deletes the state
        return self._frozen

    def take(self, run: WatchedRun, metrics: Metrics, details: Details) -> Callable[[], Taken | None]:
        """Keep a step, and where the run is before and after it."""
        before = self._mark
        if details.frozen is not None:
            self._frozen, self._mark = details.frozen, _mark(run, details.loss_scale)
        return partial(self._read, Taken(run.global_steps, metrics, details, before, self._mark))

    def _read(self, step: Taken) -> Taken | None:
        """Check a step; return it if the run stops for it."""
        metrics, scale = step.metrics, step.details.loss_scale
        values = metrics[LOSS], metrics["grad_norm"], metrics["skipped"], scale.stuck, step.details.frozen
        loss, norm, skipped, stuck, frozen = jax.device_get(values)
        if frozen:
            return step
        scaled = self._step.config.fp16.enabled  # whose overflows are part of the search for a scale
        bad = not math.isfinite(loss) or not (math.isfinite(norm) or scaled)
        if bad and not self._in_a_row and self._warnings < MOST_WARNINGS:
            self._warnings += 1
            what = f"the loss is {float(loss):g}" if not math.isfinite(loss) else "the gradient is not finite"
            effect = "the step changed nothing" if skipped else "the step changed the parameters"
            self._observers.emit(Noticed(step.number, NOT_FINITE, f"{what}, {effect}; {HINT}"))
        self._in_a_row = bad
        if stuck:
            check_stuck(scale, self._step.trainable_names)
        return None

    def explain(self, run: WatchedRun, step: Taken) -> NonFiniteError:
        """Search a step that stopped the run, which is back where it was; return an error with what was found."""
        self.restart()
        with heartbeat.work():  # compiles
            text = self._explain(run, step, Finding(step.number, float(step.metrics[LOSS])))
        self._observers.emit(Noticed(step.number, NOT_FINITE, text, raised=True))
        return NonFiniteError(
            f"{text}\n  the run is where it was before this step: engine.save_checkpoint(...) saves that state"
        )

    def _explain(self, run: WatchedRun, step: Taken, found: Finding) -> str:
        """Search, save what a replay needs, and put both into words; an error in either must not hide the other.

        All processes take part in the save, so none begins it if the search failed on one.
        """
        fed = step.details.fed
        assert fed is not None  # noqa: S101
        problem = None
        try:
            repeat = Repeat(self._step.setup, run.state, fed)
            found = find_non_finite(repeat, replace(found, of=repeat.accum))
            samples = _samples(run.training_dataloader, step, repeat.accum)
            numbers = repeat.numbers(found.micro_batch)
            found = found.located(numbers, [] if samples is None else [int(samples[n]) for n in numbers])
        except Exception as error:
            problem = in_a_line(error)
        if problem := _of_any(problem):
            return f"{found}\n  the search failed: {problem}"
        try:
            return f"{found}\n  {save_replay(self._section.output_path, repeat, found, samples)}"
        except Exception as error:
            return f"{found}\n  nothing is saved for a replay: {in_a_line(error)}"


def _of_any(problem: str | None) -> str | None:
    """Return the problem of one process; None if no process has one. A process that is lost is one, too."""
    try:
        return share_problem("the search of a step that is not finite", problem, AGREE)
    except (LostProcessError, jax.errors.JaxRuntimeError) as error:
        return problem or in_a_line(error)


def _samples(loader: DataLoader | None, step: Taken, micro_batches: int) -> np.ndarray | None:
    """List the samples of a step in the order of its rows; None if its batch did not come from the loader alone."""
    positions = [mark.position for mark in (step.before, step.after) if mark is not None]
    if loader is None or None in positions:
        return None
    data = [[position["epoch"], position["samples"]] for position in positions if position is not None]
    rows = micro_batches * loader.step.micro_size
    try:
        return rows_of(Step(step.number, 0, 0.0, rows, {}, data, loader.order))
    except ConfigError:
        return None


def _mark(run: WatchedRun, loss_scale: LossScale) -> Mark:
    loader = run.training_dataloader
    counters = {name: getattr(run, name) for name in ("global_steps", "global_samples", "micro_steps")}
    return Mark(counters, loss_scale, None if loader is None else loader.position)
