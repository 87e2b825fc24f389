"""The plain lines of a run: progress every `steps_per_print` steps, the time of each part and the memory in use."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jzero.config import Config
from jzero.data.curriculum import Curriculum
from jzero.engine.clock import Clock
from jzero.engine.follower import Then
from jzero.engine.memory_lines import used
from jzero.loss import STEP_METRICS
from jzero.train_step import Metrics, TrainStep

EVERY = 10  # steps between the lines of a breakdown without steps_per_print: DeepSpeed's default of that key


class Run(Protocol):
    """The part of the engine that the lines need."""

    step_fn: TrainStep
    global_steps: int
    global_samples: int
    curriculum: Curriculum | None
    training_dataloader: Any

    @property
    def metrics(self) -> Metrics: ...


class Lines:
    """Prints plain lines on process 0.

    Attributes:
      timed: whether the config asks for the time of each part.
      prints: whether this process prints.
      times: {part: milliseconds per step} up to the last line; empty before it, and unless `timed`.
    """

    def __init__(self, config: Config):
        self._config, self._memory = config, config.memory_breakdown
        self.timed, self.prints = config.wall_clock_breakdown, jax.process_index() == 0
        self._every = config.steps_per_print or (EVERY if self.timed or self._memory else None)
        self.times = dict[str, float]()
        self.restart(0)

    def restart(self, samples: int) -> None:
        """Measure the speed from here, `samples` into the run."""
        self._samples, self._since = samples, time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return whether a step has lines."""
        return self._every is not None and step % self._every == 0

    def progress(self, run: Run, clock: Clock) -> Then:
        """Return what prints the lines about a step, once its metrics and the number of skipped steps are known."""
        step, samples = run.global_steps, run.global_samples
        length = None if run.curriculum is None else run.curriculum.length(step)
        known = None  # the speed and the times, if the host has waited for the step
        if self.timed:
            self.times = clock.read(step)
            known = self._speed(samples, time.perf_counter())
        times = self.times

        def say(results: tuple[Mapping[str, Any], Any], end: float) -> None:
            metrics, skipped = results
            speed = self._speed(samples, end) if known is None else known
            self.say(line(step, metrics, int(skipped), speed, self._config, length))
            if self.timed:
                self.say(time_line(step, times))
            self.memory(f"after step {step}")

        return say

    def _speed(self, samples: int, now: float) -> float:
        """Return the samples per second since the last line."""
        speed = (samples - self._samples) / (now - self._since)
        self._samples, self._since = samples, now
        return speed

    def memory(self, when: str, result: Any = None) -> None:
        """Print the memory in use once a result is ready, if the config asks for it."""
        if self._memory:
            jax.block_until_ready(result)
            self.say(used(when))

    def say(self, text: str) -> None:
        """Print a text on process 0."""
        if self.prints:
            sys.stdout.write(f"{text}\n")  # at once: the script prints too
            sys.stdout.flush()


def line(
    step: int, metrics: Mapping[str, Any], skipped: int, speed: float, config: Config, length: int | None = None
) -> str:
    """Format one line about a finished step; `speed` is in samples per second, `length` that of a curriculum."""
    m = {name: float(value) for name, value in metrics.items()}
    scale = f", loss scale {m['loss_scale']:g}" if config.fp16.enabled else ""
    rate = f", {speed:.1f} samples/s" if config.timers.throughput.enabled else ""
    cut = f", sequence {length}" if length else ""
    own = "".join(f", {name} {x:.4g}" for name, x in m.items() if name not in STEP_METRICS)
    return (
        f"step {step}: loss {m['loss']:.4f}{own}, lr {m['lr']:.3e}, grad norm {m['grad_norm']:.3f}{scale}, "
        f"skipped {skipped}{cut}{rate}"
    )


def time_line(step: int, parts: Mapping[str, float]) -> str:
    """Format the milliseconds per step of each part.

    >>> time_line(10, {"host": 1.5, "device": 310.0, "script": 0.25})
    'step 10: 311.8 ms a step = host 1.5 + device 310.0 + script 0.2'
    """
    listed = " + ".join(f"{part} {spent:.1f}" for part, spent in parts.items())
    return f"step {step}: {sum(parts.values()):.1f} ms a step = {listed}"
