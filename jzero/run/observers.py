"""The observers of a run: every event goes to each of them, in the order in which the devices finish their work."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

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
from jzero.run import step_memory, summary
from jzero.run.clock import CHECKPOINT, DEVICE, EVALUATION, HOST, PROFILE, SCRIPT, Clock, per_step
from jzero.run.lines import Lines
from jzero.run.monitors import Curves
from jzero.run.panel import make_panel
from jzero.run.result_waiter import DeviceWork, ResultWaiter, warn
from jzero.run.run_report import step_report
from jzero.run.speed import CompletedSteps
from jzero.run.summary import Summary
from jzero.step.programs import StepResult
from jzero.step.train_step import TrainStep


class Observer(Protocol):
    """Sees every event of a run, in order, in the waiter's thread."""

    def on(self, event: Event) -> None:
        """Take an event. Its arrays are not to be read: what has ended has floats."""


class Observers:
    """Times the parts of a run, and passes its events on.

    It keeps neither the step nor a state, since the thread and the program's end keep it longer than the engine lives.

    Attributes:
      clock: the one clock of the run.
      waiter: waits for what the devices were given; on other processes than 0 only if somebody asks for it.
      completed: the steps that they have finished.
      lines, curves, ledger, profiles, panel: what is shown and recorded; panel is None where there is none.
      has_stepped: whether the first step was shown.
      wanted: the types of events that the engine's user observes.
      happened: those of them that nobody has been told.
    """

    def __init__(self, step: TrainStep, resume: Path | None = None, began: float | None = None):
        config, self._devices = step.config, step.mesh.size
        self._config = config
        self.profiles = Profiles(config)
        self.lines, self.curves = Lines(config, step.setup.optimizer.schedule), Curves(config)
        self.waiter, self.completed = ResultWaiter(), CompletedSteps()
        self.clock = Clock(self.waiter.worked)
        self.ledger = Recorder(step, resume, began, self.waiter.settle)
        self._all: tuple[Observer, ...] = (self.completed, self.ledger, self.curves, self.lines)
        progress = config.progress
        self._shows = self.lines.prints and (progress.summary or progress.panel is not False)
        self.panel = make_panel(step, self.waiter.busy, self.completed, self.clock) if self._shows else None
        # Elsewhere nothing is shown, but a comparison of processes, and DeepSpeed's timers, need the time in which the
        # devices wait.
        self._follows = self.lines.prints or self.lines.timed or config.straggler_check.every is not None
        self.wanted: set[type] = set()
        self.happened = deque[Event]()
        self._work: DeviceWork | None = None  # of what the devices were given, until its event
        self._mark: tuple[int, Moment] = 0, Moment(time.perf_counter(), {})  # of the last progress line
        self.has_stepped = False
        self._last_part = SCRIPT  # of the clock: what follows the last step
        self._saving: SaveBegan | None = None
        self._files = dict(self.curves.places)

    # ------------------------------------------------------------------ time

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Moment]:
        """Time this context as one part of the run; the time since the last part counts as the script's."""
        began = self.clock.lap(SCRIPT)
        try:
            yield began
        finally:
            self.clock.lap(name)

    def run(self, step: Callable[[], StepResult], number: int) -> tuple[StepResult, Moment]:
        """Run a step; return its results, and when it began.

        Under wall_clock_breakdown this waits for the results, to tell the devices' time from the host's. Otherwise the
        host prepares the next step in the meantime.
        """
        line = self._has_line(number)
        profiled = self.profiles.around(number, lambda: self.part(PROFILE), line_due=self.lines.timed and line)
        with profiled as wait:
            with self.part(HOST) as began:
                done = step()
            self._given(DEVICE)
            # Before the next step takes memory.
            self._ready(done, DEVICE, wait or (self._config.memory_breakdown and line))
        return done, began

    def evaluate(self, evaluation: Callable[[], Any]) -> tuple[Any, Moment]:
        """Run an evaluation; return its results, and when it began."""
        with self.part(EVALUATION) as began:
            found = evaluation()
            self._given(EVALUATION)
            self._ready(found, EVALUATION)
        return found, began

    def _given(self, part: str) -> None:
        """Note that the devices have work, if anybody asks."""
        if self._work is not None:  # an exception kept its event away
            self._work.end = time.perf_counter()
        self._work = self.waiter.begin(part) if self._follows else None

    def _ready(self, results: Any, part: str, wait: bool = False) -> None:
        """Wait for results, under wall_clock_breakdown always, so that no other part waits for them."""
        if self.lines.timed or wait:
            jax.block_until_ready(results)
            self.waiter.ended()
            self.clock.lap(part)

    def _has_line(self, step: int, last: bool = False) -> bool:
        """Return whether a step has a progress line; the run's last step always has one."""
        every = self.lines.every
        return last or (every is not None and step % every == 0)

    # ------------------------------------------------------------------ events

    def emit(self, event: Event) -> None:
        """Pass an event on to all observers, once its arrays have values."""
        self._note(event)
        handling = HANDLINGS[type(event)]
        results, work = handling.when_given(self, event)
        if self._follows:
            self.waiter.give(results, partial(self._deliver, event, handling), work)

    def _deliver(self, event: Event, handling: Handling, values: Any, end: float) -> None:
        """Take an event in the waiter's thread: the only place where metrics become floats."""
        ended = handling.when_ended(self, event, values, end)
        if ended is not event:
            self._note(ended)
        for observer in self._all:
            try:
                observer.on(ended)
            except BaseException as error:  # one that fails must not keep the event from the others
                warn(error)

    def _give_step(self, event: StepGiven) -> Given:
        self._last_part = CHECKPOINT if event.last else SCRIPT
        return (event.metrics, event.skipped), self._take_work()

    def _end_step(self, event: StepGiven, values: Any, end: float) -> StepEnded:
        metrics, skipped = {name: float(x) for name, x in values[0].items()}, int(values[1])
        line = self._has_line(event.step, event.last)
        parts = self._breakdown(event) if line and self.lines.timed else {}
        return StepEnded(event, metrics, skipped, end, line, parts)

    def _give_evaluation(self, event: EvaluationGiven) -> Given:
        return event.metrics, self._take_work()

    def _end_evaluation(self, event: EvaluationGiven, values: Any, end: float) -> EvaluationEnded:
        metrics = {name: float(x) for name, x in values.items()}
        return EvaluationEnded(event.step, event.samples, metrics, event.began, end)

    def _say_notice(self, event: Noticed) -> Given:
        if not event.raised:
            self.lines.say(escaped(f"jzero: step {event.step}: {event.text}"))  # now, whatever the devices do
        return NOTHING

    def _start_state(self, event: StateStarted) -> Given:
        self.waiter.settle()  # lines of the former state measure from its mark
        if work := self._take_work():  # of a step whose checks stopped the run
            work.end = time.perf_counter()
        return NOTHING

    def _mark_state(self, event: StateStarted, values: Any, end: float) -> StateStarted:
        self._mark = event.step, event.at
        return event

    def _begin_save(self, event: SaveBegan) -> Given:
        self._note_saved()  # the one before, which this one has waited for
        self._saving, self._files["checkpoints"] = event, str(event.save.path.parent)
        return NOTHING

    def _take_work(self) -> DeviceWork | None:
        work, self._work = self._work, None
        return work

    def _breakdown(self, event: StepGiven) -> dict[str, float]:
        """Return the milliseconds per step of each part since the last progress line."""
        (step, since), self._mark = self._mark, (event.step, event.at)
        return per_step(since.spent, event.at.spent, event.step - step)

    def _note(self, event: Event) -> None:
        if type(event) in self.wanted:
            self.happened.append(event)

    def want(self, kind: type) -> None:
        """Keep the events of a type in `happened`."""
        self.wanted.add(kind)
        self._follows |= kind in (StepEnded, EvaluationEnded)

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

    def show(self, event: StepGiven, step: TrainStep) -> None:
        """Show what reads the program of a step. All processes call it."""
        waited = self.lines.timed or self._config.memory_breakdown
        if event.last or (waited and self._has_line(event.step)):
            self.waiter.settle()  # the host has waited for the step anyway, and its line comes before its profile
        for text in self.profiles.texts(event.step, step):
            self.lines.say(text)
        if self._shows and summary.last is not self:
            summary.print_at_end(self)
        if self.panel:
            self.panel.step()

    def show_first(self, event: StepGiven, step: TrainStep, planned: Callable[[], str]) -> None:
        """Print what only the first step shows, before its own line; `planned` describes its memory."""
        self.has_stepped = True
        if self._config.memory_breakdown and step.traced:
            self.lines.say(step_memory.by_module(step))
            self.lines.say(planned())  # on every process, because it may compile
            self.lines.memory("after the first step", event.metrics)
        if self.lines.prints and (remarks := step_report(step)):
            self.lines.say(remarks)
        if self._shows:
            self.completed.find_ideal(step)

    # ------------------------------------------------------------------ the end

    def summary(self) -> Summary | None:
        """Wait for the last step, and sum up; None if there was no step, or the config wants no summary."""
        self.clock.lap(self._last_part)
        self.waiter.settle()
        self.clock.lap(DEVICE)
        if self.panel:
            self.panel.stop(keep=True)
        if not (self.completed.totals.steps and self._config.progress.summary):
            return None
        profiled = self.profiles.times
        return Summary.of(self.clock, self.completed, self._files, self.ledger, self._config, self._devices, profiled)

    def close(self) -> None:
        """Write what the devices have finished, and end the files."""
        self.waiter.settle()
        for observer in (self.ledger, self.curves):
            observer.on(RunEnded(last_words.ended_by()))
        self.waiter.close()


Given = tuple[Any, DeviceWork | None]  # the arrays that an event waits for, and the work that ends with them
NOTHING: Given = (None, None)


class Handling(NamedTuple):
    """The way of one type of events through the observers.

    Attributes:
      when_given: at once, in the script's thread; returns what the event waits for.
      when_ended: (event, values of the arrays, time) -> the event that the observers see, in the waiter's thread.
    """

    when_given: Callable[[Observers, Any], Given] = lambda observers, event: NOTHING
    when_ended: Callable[[Observers, Any, Any, float], Event] = lambda observers, event, values, end: event


HANDLINGS: dict[type, Handling] = {
    StepGiven: Handling(Observers._give_step, Observers._end_step),
    EvaluationGiven: Handling(Observers._give_evaluation, Observers._end_evaluation),
    StateStarted: Handling(Observers._start_state, Observers._mark_state),
    SaveBegan: Handling(Observers._begin_save),
    Noticed: Handling(Observers._say_notice),
}
