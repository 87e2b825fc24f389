"""The plain lines of a run: progress every `steps_per_print` steps, time, memory, the schedule's end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from jzero.config import Config
from jzero.errors import one_line
from jzero.events import Event, StateStarted, StepEnded
from jzero.loss import STEP_METRICS
from jzero.optimizers.lr_schedules import LRSchedule
from jzero.run.step_memory import used

EVERY = 10  # steps between the lines of a breakdown without steps_per_print: DeepSpeed's default of that key


class Lines:
    """Prints plain lines on process 0.

    Attributes:
      every: steps from one progress line to the next; None without such lines.
      timed: whether the config asks for the time of each part.
      prints: whether this process prints.
      times: {part: milliseconds per step} up to the last line; empty before it, and unless `timed`.
    """

    def __init__(self, config: Config, schedule: LRSchedule | None):
        self._config, self._schedule, self._total = config, schedule, scheduled_steps(schedule)
        self.timed, self.prints = config.wall_clock_breakdown, jax.process_index() == 0
        self.every = config.steps_per_print or (EVERY if self.timed or config.memory_breakdown else None)
        self.times: Mapping[str, float] = {}
        self._samples, self._since = 0, time.perf_counter()  # where the speed of the next line begins

    def has_line(self, step: int, last: bool = False) -> bool:
        """Return whether a step has a progress line; the run's last step always has one."""
        return last or (self.every is not None and step % self.every == 0)

    def on(self, event: Event) -> None:
        """Print the lines about an event."""
        if isinstance(event, StepEnded):
            if event.has_line:
                self._progress(event)
            self.say(self.end_of_schedule(event.step, event.skipped))
        elif isinstance(event, StateStarted):
            self._samples, self._since = event.samples, event.at.time

    def _progress(self, event: StepEnded) -> None:
        # Under the breakdown the host has waited for the step, and its clock and the speed measure the same time.
        end = event.given.at.time if self.timed else event.end
        speed = (event.samples - self._samples) / (end - self._since)
        self._samples, self._since = event.samples, end
        self.say(line(event, speed, self._config))
        if self.timed:
            self.times = event.parts
            self.say(time_line(event.step, event.parts))
        self.memory(f"after step {event.step}")

    def memory(self, when: str, result: Any = None) -> None:
        """Print the memory in use once a result is ready, if the config asks for it."""
        if self._config.memory_breakdown:
            jax.block_until_ready(result)
            self.say(used(when))

    def say(self, text: str) -> None:
        """Print a text on process 0; nothing if it is empty."""
        if self.prints and text:
            sys.stdout.write(f"{text}\n")  # at once: the script prints too
            sys.stdout.flush()

    def end_of_schedule(self, step: int, skipped: int) -> str:
        """Return the line about a finished step, `skipped` of those up to it; "" unless it is the first beyond the end.

        The schedule does not advance in a step that is skipped.
        """
        if self._schedule is None or self._total is None or step - skipped <= self._total:
            return ""
        last = float(self._schedule.lr(self._total + 1))  # DeepSpeed's schedules are one step late
        end, self._total = self._total + skipped, None  # once
        return f"jzero: the schedule ended at step {end:,}; the learning rate stays at {last:g}"


def line(event: StepEnded, speed: float, config: Config) -> str:
    """Format one line about a finished step; `speed` is in samples per second."""
    m, length = event.metrics, event.given.length
    scale = f", loss scale {m['loss_scale']:g}" if config.fp16.enabled else ""
    rate = f", {speed:.1f} samples/s" if config.timers.throughput.enabled else ""
    cut = f", sequence {length}" if length else ""
    own = "".join(f", {one_line(name)} {x:.4g}" for name, x in m.items() if name not in STEP_METRICS)
    return (
        f"step {event.step}: loss {m['loss']:.4f}{own}, lr {m['lr']:.3e}, grad norm {m['grad_norm']:.3f}{scale}, "
        f"skipped {event.skipped}{cut}{rate}"
    )


def time_line(step: int, parts: Mapping[str, float]) -> str:
    """Format the milliseconds per step of each part.

    >>> time_line(10, {"host": 1.5, "device": 310.0, "script": 0.25})
    'step 10: 311.8 ms a step = host 1.5 + device 310.0 + script 0.2'
    """
    listed = " + ".join(f"{part} {spent:.1f}" for part, spent in parts.items())
    return f"step {step}: {sum(parts.values()):.1f} ms a step = {listed}"


def scheduled_steps(schedule: LRSchedule | None) -> int | None:
    """Return the optimizer steps of a schedule; None if it names none."""
    return schedule.params.get("total_num_steps") if schedule else None
