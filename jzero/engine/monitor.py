"""What happens around each step of an engine: its time is measured, its metrics are printed and passed on."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jzero.diagnosis.verdict import verdict
from jzero.engine.clock import CHECKPOINT, DEVICE, EVALUATION, HOST, PROFILE, SCRIPT, Clock
from jzero.engine.finished import Finished
from jzero.engine.follower import Follower, Then
from jzero.engine.lines import Lines, Run
from jzero.engine.memory_lines import planned
from jzero.engine.memory_table import by_module
from jzero.engine.panel import Panel, make_panel
from jzero.engine.schedule_end import ScheduleEnd
from jzero.engine.speed import ideal
from jzero.engine.step_report import step_report
from jzero.engine.summary import Ending, print_at_end
from jzero.ledger.recorder import Recorder
from jzero.monitors import Curves
from jzero.profiling.profiles import Profiles
from jzero.train_step import Metrics, TrainStep


class Monitor:
    """Measures and shows the steps of one engine.

    Attributes:
      clock: the one clock of the run; spent: {part: seconds} of it.
      lines: its plain lines.
      curves: where its metrics go.
      follower: waits for what the devices were given; on other processes than 0 only for `straggler_check`.
      finished: the steps that they have finished.
      ledger: the record of the run.
      ending: what happens at the end of the run.
    """

    def __init__(self, step: TrainStep, resume: Path | None = None, began: float | None = None):
        self._planned = step.config.memory_breakdown
        self._first = True
        self._profiles = Profiles(step.config)
        self.lines, self.curves = Lines(step.config), Curves(step.config)
        self.follower, self.finished = Follower(), Finished()
        self._schedule_end = ScheduleEnd(step.setup.schedule)
        self.clock = Clock(self.follower.worked)
        self.spent = self.clock.total
        progress = step.config.progress
        self.ending = Ending(self.clock, self.follower, self.finished, dict(self.curves.places), progress.summary)
        self.ledger, self._began = Recorder(step, resume, began, self.clock.total, self.follower), 0.0
        self.ending.goodput = self.ledger.goodput
        # The program keeps the last run's ending, which must not keep the step.
        config, devices, profiles = step.config, step.mesh.size, self._profiles
        self.ending.verdict = lambda seconds: verdict(seconds, config, devices, profiles.times)
        self._panel: Panel | None = None
        self._step, self._shows = step, self.lines.prints and (progress.summary or progress.panel is not False)
        # Elsewhere nothing is shown, but a comparison of processes needs the time in which their devices wait.
        self._follows = self.lines.prints or step.config.straggler_check.every is not None
        # With the engine, or at the program's end.
        self.close = weakref.finalize(self, _close, self.follower, self.curves, self.ledger)
        # The common hook of all finalizers may be older than that of `joining`, which leaves the process at once.
        atexit.register(self.close)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time this context as one part of the step; the time since the last part counts as the script's."""
        self.clock.lap(SCRIPT)
        self._began = time.time()
        try:
            yield
        finally:
            self.clock.lap(name)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Time this context, and record the save that it starts, even if it raises."""
        try:
            with self.part(CHECKPOINT):
                yield
        finally:
            if save := self.ledger.saved():
                self.ending.files["checkpoints"] = str(save.path.parent)

    def run(self, step: Callable[[], Any], number: int) -> Any:
        """Run a step; under wall_clock_breakdown wait for its results, to tell the devices' time from the host's.

        Otherwise the host prepares the next step in the meantime.
        """
        line = self.lines.is_due(number)
        profiled = self._profiles.around(number, lambda: self.part(PROFILE), line_due=self.lines.timed and line)
        with profiled as wait:
            self.ledger.begin()
            with self.part(HOST):
                done = step()
            if self._follows:
                self.follower.give(done[1], self._finished(number), part=DEVICE)
            with self.part(DEVICE):
                return self.ready(done, wait or (self._planned and line))  # before the next step takes memory

    def evaluated(self, result: Any) -> Any:
        """Return the result of an evaluation, as `ready` does."""
        if self._follows:
            self.follower.give(result, part=EVALUATION)
        return self.ready(result)

    def ready(self, result: Any, wait: bool = False) -> Any:
        """Return a result; under wall_clock_breakdown once it is ready, so that no other part waits for it."""
        if self.lines.timed or wait:
            jax.block_until_ready(result)
            self.follower.ended()
        return result

    def finish(self, run: Run, skipped: jax.Array, last: bool) -> None:
        """Show a step that was given to the devices; the run's last step always has a progress line.

        Args:
          skipped: steps so far that changed nothing.
          last: whether SIGTERM ends the run after this step.
        """
        if last:
            self.ending.part = CHECKPOINT
        with self.part(HOST):
            if self._first:
                self._remarks(run)
            self._first = False
            self._pass_on(run, skipped, last)
            for text in self._profiles.texts(run.global_steps, run.step_fn):
                self.lines.say(text)
            if self._shows:
                print_at_end(self.ending)
            if self._panel:
                self._panel.step()

    def _finished(self, number: int) -> Then:
        amount, finished = self._step.amount, self.finished
        return lambda metrics, end: finished.add(number, amount, {name: float(x) for name, x in metrics.items()}, end)

    def _pass_on(self, run: Run, skipped: jax.Array, last: bool) -> None:
        """Have the step's metrics written and printed once they are there."""
        lines, curves, samples, step = self.lines, self.curves, run.global_samples, run.global_steps
        record = self.ledger.step(run, last)
        due = last or self.lines.is_due(step)
        say = self.lines.progress(run, self.clock) if due else None
        times = dict(self.lines.times) if due and self.lines.timed else None
        end_of_schedule, may_be_over = self._schedule_end, self._schedule_end.may_be_over(step)

        def pass_on(results: tuple[Metrics, Any], end: float) -> None:
            metrics = {name: float(x) for name, x in results[0].items()}
            record(metrics, end)
            curves.step(metrics, samples, step)
            if times is not None:
                curves.times(times, samples, step)
            if say is not None:
                say((metrics, results[1]), end)
            if may_be_over and (text := end_of_schedule.line(step, int(results[1]))):
                lines.say(text)

        if self.lines.prints:
            self.follower.give((run.metrics, skipped if due or may_be_over else 0), pass_on)
            if last or (due and (self.lines.timed or self._planned)):  # the host has waited for the step anyway
                self.follower.settle()

    def evaluation(self, run: Run, metrics: Metrics) -> None:
        """Pass on the loss and metrics of an evaluation."""
        curves, samples, step = self.curves, run.global_samples, run.global_steps
        if self.lines.prints:
            self.follower.give(dict(metrics), lambda values, end: curves.evaluation(values, samples, step))
        self.ledger.evaluation(run, metrics, self._began)

    def notice(self, step: int, what: str, text: str) -> None:
        """Print a line about a step, and record it."""
        self.lines.say(f"jzero: step {step}: {text}")
        self.record(step, what, text)

    def record(self, step: int, what: str, text: str) -> None:
        """Record what a check found about a step."""
        self.ledger.notice(step, what, text)

    def restarted(self, run: Run, origin: str | os.PathLike | None = None) -> None:
        """Measure from here, where the run has a new state; `origin` is the directory that it is from."""
        self.follower.settle()  # lines of the former state measure from its mark
        self.clock.restart(run.global_steps)
        self.lines.restart(run.global_samples)
        self.ledger.state(run, origin)

    def _remarks(self, run: Run) -> None:
        """Print what only the first step shows, and prepare what shows the next ones."""
        if self._planned and run.step_fn.traced:
            self.lines.say(by_module(run.step_fn))
            self.lines.say(planned(run.step_fn, run.curriculum))  # on every process, because it may compile
            self.lines.memory("after the first step", run.metrics)
        if self.lines.prints and (remarks := step_report(run.step_fn)):
            self.lines.say(remarks)
        if self._shows:
            with contextlib.suppress(Exception):  # it serves the displays alone, and other processes would wait
                self.ending.best = ideal(run.step_fn)
            self._panel = make_panel(run.step_fn, self.follower, self.finished, self.clock, self.ending.best)
            if self._panel:
                self.ending.stop_panel = partial(self._panel.stop, keep=True)


def _close(follower: Follower, curves: Curves, ledger: Recorder) -> None:
    """Write what the devices have finished, and end the files."""
    follower.settle()
    ledger.close()
    curves.close()
    follower.close()
