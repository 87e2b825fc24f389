"""The profiles that a config asks for, around the steps of an engine."""

from __future__ import annotations

import time
from pathlib import Path

import jax

from jzero.config import Config
from jzero.profiling.flops import step_flops
from jzero.train_step import TrainStep


class Profiles:
    """The profiles of one engine.

    `flops_profiler` prints the FLOPs of step `profile_step`, and times it. The first step of a process compiles, so the
    second takes its place.
    """

    def __init__(self, config: Config):
        self.flops = config.flops_profiler
        self._timed = self.flops.profile_step if self.flops.enabled else None
        self._start = self._seconds = 0.0

    def begin(self, number: int, *, first: bool) -> None:
        """Begin a step; `first`: of this process."""
        if first and number == self._timed:
            self._timed = number + 1
        self._start = time.perf_counter()

    def waits_for(self, number: int) -> bool:
        """Return whether a step is waited for: the one that is timed, and the one before it."""
        return self._timed is not None and number in (self._timed - 1, self._timed)

    def end(self) -> None:
        """End a step, whose results are ready if it was waited for."""
        self._seconds = time.perf_counter() - self._start

    def text(self, number: int, step: TrainStep) -> str:
        """Return what process 0 prints after a step; "" for nothing."""
        traced = step.traced
        if number != self._timed or traced is None or jax.process_index():
            return ""
        section, found = self.flops, step_flops(step, traced)
        title = f"FLOPs of step {number}: matrix products on one of {found.devices} devices"
        drawn = found.table(title, section.module_depth, None if section.detailed else section.top_modules)
        kind = jax.local_devices()[0]
        kind_name = "cpu" if kind.platform == "cpu" else kind.device_kind
        text = "\n".join([drawn, *found.totals(self._seconds, kind_name)])
        return _written(text, section.output_file, title) if section.output_file else text


def _written(text: str, file: str, title: str) -> str:
    """Write a text to a file; return the line that says so."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text + "\n")
    except OSError as error:  # a profile must not end the run
        return f"{text}\nflops_profiler.output_file = {file!r}: not written: {error}"
    return f"{title}: written to {file}"
