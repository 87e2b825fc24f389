"""Prints a run's progress on process 0, with the time of each part of a step and the memory in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax

from jzero.config import Config
from jzero.data.curriculum import Curriculum
from jzero.engine.clock import DEVICE, HOST, PROFILE, SCRIPT, Clock
from jzero.engine.device_times import Profile, device_line, device_times, parts_of
from jzero.engine.memory_lines import planned, used
from jzero.engine.run_report import half_precision
from jzero.loss import STEP_METRICS
from jzero.monitors import Curves
from jzero.train_step import Metrics, TrainStep

EVERY = 10  # steps between the lines of a breakdown without steps_per_print: DeepSpeed's default of that key


class Run(Protocol):
    """The part of the engine that the lines need."""

    step_fn: TrainStep
    global_steps: int
    global_samples: int
    curriculum: Curriculum | None

    @property
    def metrics(self) -> Metrics: ...

    @property
    def skipped_steps(self) -> int: ...


class Monitor:
    """Prints the lines of a run on process 0.

    Attributes:
      clock: the one clock of the run.
      times: {part: milliseconds per step} up to the last line; empty before it, and without wall_clock_breakdown.
    """

    def __init__(self, step: TrainStep):
        self._config = step.config
        self._timed, self._memory = self._config.wall_clock_breakdown, self._config.memory_breakdown
        self._every = self._config.steps_per_print or (EVERY if self._timed or self._memory else None)
        self._first, self._prints = True, jax.process_index() == 0
        self._profile: Profile | None = None
        self.clock, self.times = Clock(), dict[str, float]()
        self.curves = Curves(step.config)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time this context as one part of the step; the time since the last part counts as the script's."""
        self.clock.lap(SCRIPT)
        try:
            yield
        finally:
            self.clock.lap(name)

    def run(self, step: Callable[[], Any], number: int) -> Any:
        """Run a step; under wall_clock_breakdown wait for its results, to tell the devices' time from the host's.

        Otherwise the host prepares the next step in the meantime. The first step with a progress line is profiled,
        except the run's first: only once, because a profile may take longer than the step.
        """
        if not (self._timed and self._profile is None and not self._first and self._is_due(number)):
            return self._run(step)
        self._profile = Profile()
        with self.part(PROFILE):
            self._profile.start()
        try:
            return self._run(step)
        finally:
            with self.part(PROFILE):
                self._profile.stop()

    def _run(self, step: Callable[[], Any]) -> Any:
        with self.part(HOST):
            done = step()
        with self.part(DEVICE):
            return self.ready(done)

    def _is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def ready(self, result: Any) -> Any:
        """Return a result; under wall_clock_breakdown once it is ready, so that no other part waits for it."""
        return jax.block_until_ready(result) if self._timed else result

    def finish(self, run: Run, last: bool) -> None:
        """Print the lines that are due after a step; the run's last step always has one."""
        with self.part(HOST):
            if self._first and self._memory and run.step_fn.traced:
                self._say(planned(run.step_fn, run.curriculum))  # on every process, because it may compile
                self.memory("after the first step", run.metrics)
            if self._first and self._prints and (remarks := half_precision(run.step_fn)):
                self._say("\n".join(remarks))
            self._first = False
            self.curves.step(run.metrics, run.global_samples, run.global_steps)
            if (self._prints or self._timed) and (last or self._is_due(run.global_steps)):
                self._lines(run)
            if self._profile and self._profile.is_new:
                self._device_line(run, self._profile)

    def _lines(self, run: Run) -> None:
        step, skipped = run.global_steps, run.skipped_steps  # waits for the step
        reading = self.clock.read(step, run.global_samples)
        length = None if run.curriculum is None else run.curriculum.length(step)
        self._say(line(step, run.metrics, skipped, reading.speed, self._config, length))
        if self._timed:
            self.times = reading.parts
            self._say(time_line(step, reading.parts))
            self.curves.times(reading.parts, run.global_samples, step)
        self.memory(f"after step {step}")

    def _device_line(self, run: Run, profile: Profile) -> None:
        profile.is_new = False
        traced = run.step_fn.traced
        text = traced.lower().compile().as_text() if traced else ""  # on every process, because it may compile
        if profile.problem:
            self._say(f"step {run.global_steps}: no profile of the device: {profile.problem}")
        else:
            self._say(device_line(run.global_steps, device_times(profile.kernels, parts_of(text))))

    def memory(self, when: str, result: Any = None) -> None:
        """Print the memory in use once a result is ready, if the config asks for it."""
        if self._memory:
            jax.block_until_ready(result)
            self._say(used(when))

    def _say(self, text: str) -> None:
        if self._prints:
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
