"""The observers of a run: every event goes to each of them, in the order in which the devices finish their work."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jzero.data.curriculum import Curriculum
from jzero.distributed import last_words
from jzero.errors import escaped
from jzero.events import (
    EvaluationEnded,
    EvaluationGiven,
    Event,
    Moment,
    Noticed,
    RunEnded,
    SaveBegan,
    SaveEnded,
    StateStarted,
    StepEnded,
    StepGiven,
)
from jzero.ledger.recorder import Recorder
from jzero.profiling.profiles import Profiles
from jzero.run import step_memory
from jzero.run.clock import CHECKPOINT, DEVICE, EVALUATION, HOST, PROFILE, SCRIPT, Clock, per_step
from jzero.run.lines import Lines
from jzero.run.monitors import Curves
from jzero.run.panel import make_panel
from jzero.run.result_waiter import ResultWaiter, warn
from jzero.run.run_report import step_report
from jzero.run.speed import CompletedSteps
from jzero.run.summary import name_bottleneck, summary_text
from jzero.step.programs import StepResult
from jzero.step.train_step import TrainStep


class Observers:
    """Times what the devices are given, passes events on, and shows on process 0 what reads the program of a step.

    It holds neither the step nor a state, since the thread and the program's end keep it longer than the engine lives.

    Attributes:
      clock: the one clock of the run.
      waiter: waits for what the devices were given; on other processes than 0 only if somebody asks for it.
      completed: the steps that the devices have finished.
      lines, curves, ledger, profiles, panel: what is shown and recorded; panel is None where there is none.
      wanted: the types of events that the engine's user observes.
      happened: those of them that nobody has been told.
    """

    def __init__(
        self, step: TrainStep, resume: Path | None = None, began: float | None = None,
        curriculum: Curriculum | None = None,
    ):  # fmt: skip
        self._step, self._curriculum, self._has_stepped = weakref.ref(step), curriculum, False
        self._config, self._devices = config, _ = step.config, [*step.mesh.devices.flat]
        self.profiles = Profiles(config)
        self.lines, self.curves = Lines(config, step.setup.optimizer.schedule), Curves(config)
        # Elsewhere nothing is shown, but a comparison of processes, and DeepSpeed's timers, need the devices' waits.
        follows = self.lines.prints or self.lines.timed or config.straggler_check.every is not None
        self.waiter, self.completed = ResultWaiter(follows), CompletedSteps()
        self.clock = Clock(self.waiter.worked)
        self.ledger = Recorder(step, resume, began, self.waiter.settle)
        # They see every event, in order, in the waiter's thread. Arrays are not to be read: what has ended has floats.
        self._all = self.completed.on, self.ledger.on, self.curves.on, self.lines.on
        self._shows = self.lines.prints and (config.progress.summary or config.progress.panel is not False)
        self.panel = make_panel(step, self.waiter.busy, self.completed, self.clock) if self._shows else None
        self.wanted: set[type] = set()
        self.happened = deque[Event]()
        self._mark: tuple[int, Moment] = 0, Moment(time.perf_counter(), {})  # of the last progress line
        self._last_part = SCRIPT  # of the clock: what follows the last step
        self._steps: tuple[Moment, Moment] | None = None  # when the first began, and when the last was given
        self._saving: SaveBegan | None = None
        self._files = dict(self.curves.places)

    # ------------------------------------------------------------------ what the devices are given

    def run_step(self, step: Callable[[], StepResult], number: int) -> tuple[StepResult, Moment]:
        """Run a step; return its results, and when it began.

        Under wall_clock_breakdown this waits for the results, to tell the devices' time from the host's. Otherwise the
        host prepares the next step in the meantime.
        """
        line = self.lines.has_line(number)
        profiled = self.profiles.around(number, lambda: self.clock.part(PROFILE), line_due=self.lines.timed and line)
        with profiled as wait:
            with self.clock.part(HOST) as began:
                done = step()
            # Before the next step takes memory.
            self._given(done[1], DEVICE, wait or (self._config.memory_breakdown and line))
        return done, began

    def run_evaluation(self, evaluation: Callable[[], Any]) -> tuple[Any, Moment]:
        """Run an evaluation; return its results, and when it began."""
        with self.clock.part(EVALUATION) as began:
            found = evaluation()
            self._given(found, EVALUATION)
        return found, began

    def _given(self, results: Any, part: str, wait: bool = False) -> None:
        """Note that the devices have work; wait for it under wall_clock_breakdown, so that no other part does."""
        self.waiter.begin(part, results)
        if self.lines.timed or wait:
            jax.block_until_ready(results)
            self.waiter.ended()
            self.clock.lap(part)

    # ------------------------------------------------------------------ events

    def emit(self, event: Event) -> None:
        """Pass an event on to all observers, once its arrays have values. All processes call it."""
        self._note(event)
        results: Any = None
        match event:
            case StepGiven():
                if not self._has_stepped and (step := self._step()):
                    self._show_first(event, step)
                self._last_part = CHECKPOINT if event.last else SCRIPT
                self._steps = self._steps[0] if self._steps else event.began, event.at
                results = event.metrics, event.skipped
            case EvaluationGiven():
                results = event.metrics
            case StateStarted():
                self.waiter.settle()  # lines of the former state measure from its mark
            case SaveBegan():
                self._note_saved()  # the one before, which this one has waited for
                self._saving, self._files["checkpoints"] = event, str(event.save.path.parent)
            case Noticed(raised=False):
                self.lines.say(escaped(f"jzero: step {event.step}: {event.text}"))  # now, whatever the devices do
        self.waiter.give(results, partial(self._deliver, event))
        if isinstance(event, StepGiven):
            self._show(event)

    def _deliver(self, event: Event, values: Any, end: float) -> None:
        """Pass on an event that has ended, in the waiter's thread."""
        ended = self._ended(event, values, end)
        if ended is not event:
            self._note(ended)
        for observe in self._all:
            try:
                observe(ended)
            except BaseException as error:  # one that fails must not keep the event from the others
                warn(error)

    def _ended(self, event: Event, values: Any, end: float) -> Event:
        """Return the event that observers see: here alone metrics become floats."""
        match event:
            case StepGiven():
                metrics, skipped = {name: float(x) for name, x in values[0].items()}, int(values[1])
                line = self.lines.has_line(event.step, event.last)
                parts: Mapping[str, float] = {}
                if line and self.lines.timed:  # in milliseconds per step since the last progress line
                    (step, since), self._mark = self._mark, (event.step, event.at)
                    parts = per_step(since.spent, event.at.spent, event.step - step)
                return StepEnded(event, metrics, skipped, end, line, parts)
            case EvaluationGiven():
                metrics = {name: float(x) for name, x in values.items()}
                return EvaluationEnded(event.step, event.samples, metrics, event.began, end)
            case StateStarted():
                self._mark = event.step, event.at
        return event

    def _note(self, event: Event) -> None:
        if type(event) in self.wanted:
            self.happened.append(event)

    def want(self, kind: type) -> None:
        """Keep the events of a type in `happened`."""
        self.wanted.add(kind)
        if kind in (StepEnded, EvaluationEnded):
            self.waiter.follow()

    def told(self) -> Iterator[Event]:
        """Take the events that nobody has been told, the oldest first."""
        self._note_saved()
        while self.happened:
            yield self.happened.popleft()

    def _note_saved(self) -> None:
        if self._saving is not None and self._saving.save.done:
            self._note(SaveEnded(*self._saving))
            self._saving = None

    # ------------------------------------------------------------------ what process 0 shows of a step

    def _show_first(self, event: StepGiven, step: TrainStep) -> None:
        """Print what only the first step shows, before its own line."""
        self._has_stepped, curriculum, self._curriculum = True, self._curriculum, None
        if self._config.memory_breakdown and step.traced:
            self.lines.say(step_memory.by_module(step))
            self.lines.say(step_memory.planned(step, curriculum))  # on every process, because it may compile
            self.lines.memory("after the first step", event.metrics)
        if self.lines.prints and (remarks := step_report(step)):
            self.lines.say(remarks)
        if self._shows:
            self.completed.find_ideal(step)

    def _show(self, event: StepGiven) -> None:
        """Show what reads the program of a step."""
        waited = self.lines.timed or self._config.memory_breakdown
        if event.last or (waited and self.lines.has_line(event.step)):
            self.waiter.settle()  # the host has waited for the step anyway, and its line comes before its profile
        if step := self._step():
            for text in self.profiles.texts(event.step, step):
                self.lines.say(text)
        if self._shows and last is not self:
            print_at_end(self)
        if self.panel:
            self.panel.step()

    # ------------------------------------------------------------------ the end

    def summary(self) -> str:
        """Wait for the last step, and sum up; "" if there was no step, or the config wants no summary."""
        self.clock.lap(self._last_part)
        self.waiter.settle()
        self.clock.lap(DEVICE)
        if self.panel:
            self.panel.stop(keep=True)
        if not (self.completed.totals.steps and self._steps and self._config.progress.summary):
            return ""
        seconds = self.clock.total
        before, until = (moment.spent.get(SCRIPT, 0.0) for moment in self._steps)  # exports are no wait of a step
        verdict = name_bottleneck(seconds | {SCRIPT: until - before}, self._config, self._devices, self.profiles.times)
        lines = [self.ledger.goodput(), *verdict]
        return summary_text(seconds, self.clock.cached, self.completed, lines, self._files)

    def close(self) -> None:
        """Write what the devices have finished, and end the files."""
        self.waiter.settle()
        for observer in (self.ledger, self.curves):
            observer.on(RunEnded(last_words.ended_by()))
        self.waiter.close()


last: Observers | None = None  # of all runs of this process, the one that has taken the last step
_process = 0  # which took it: a fork has the variables of its parent, but not its run


def print_at_end(run: Observers) -> None:
    """Have the program's end print the summary of this run, unless another one takes a step later."""
    global last, _process
    if last is None:
        atexit.register(print_last)
    last, _process = run, os.getpid()


def print_last() -> None:
    """Print the summary of the run that has taken the last step.

    After an exception the traceback comes last, so there is no summary; Ctrl-C is a normal end of a run.
    """
    global last
    run, last = last, None
    if run is None or _process != os.getpid():
        return
    if isinstance(getattr(sys, "last_value", None), Exception):  # set by Python for what nothing catches
        if run.panel:
            run.panel.stop(keep=True)
    elif summary := run.summary():
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe has gone, or stdout is closed
            print(summary, flush=True)
