"""The plain lines of a run: progress every `steps_per_print` steps, the time of each part and the memory in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from jzero.config import Config
from jzero.data.curriculum import Curriculum
from jzero.engine.clock import Clock
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

    @property
    def skipped_steps(self) -> int: ...


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

    def is_due(self, step: int) -> bool:
        """Return whether a step has lines."""
        return self._every is not None and step % self._every == 0

    def progress(self, run: Run, clock: Clock) -> None:
        """Print the lines about the step that has just run; this waits for its results."""
        if not (self.prints or self.timed):
            return
        step, skipped = run.global_steps, run.skipped_steps
        reading = clock.read(step, run.global_samples)
        length = None if run.curriculum is None else run.curriculum.length(step)
        self.say(line(step, run.metrics, skipped, reading.speed, self._config, length))
        if self.timed:
            self.times = reading.parts
            self.say(time_line(step, reading.parts))
        self.memory(f"after step {step}")

    def memory(self, when: str, result: Any = None) -> None:
        """Print the memory in use once a result is ready, if the config asks for it."""
        if self._memory:
            jax.block_until_ready(result)
            self.say(used(when))

    def say(self, text: str) -> None:
        """Print a text on process 0."""
        if self.prints:
            print(text, flush=True)


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
