"""Profiles chosen steps of an engine, and describes them.

The profiler of a process has one session at a time, so a step has at most one profile. The steps of the section
`profiler` come first; the profile of the breakdown, or of the collectives, then takes the next step that it can.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from jzero.config import Config
from jzero.config.observed import ProfilerConfig
from jzero.errors import ConfigError, with_type
from jzero.files import create, read_file
from jzero.planner.collectives import KINDS, collectives
from jzero.profiling.device_times import (
    DeviceTimes,
    Profile,
    Session,
    communication,
    device_line,
    device_times,
    parts_of_instructions,
)
from jzero.profiling.flops import step_flops
from jzero.step.train_step import TrainStep


class Trace(Session):
    """A trace of the steps from `first` to `last`, in files below `output_path`."""

    def __init__(self, section: ProfilerConfig):
        self.first, self.last = section.steps or (0, -1)
        writes = section.all_processes or jax.process_index() == 0
        # XProf names a file after its host, so processes of one host need a directory each.
        own = f"process_{jax.process_index()}" if section.all_processes and jax.process_count() > 1 else ""
        directory = str(Path(section.output_path) / own) if writes else ""
        super().__init__(directory, python_tracer_level=int(section.python))

    def contains(self, step: int) -> bool:
        """Return whether a step is traced."""
        return self.first <= step <= self.last

    def line(self) -> str:
        """Say where the files are."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        if self.problem:
            return f"{steps}: no trace: {self.problem}"
        return f"{steps}: traced to {self.directory}; open it with xprof, or its .trace.json.gz in Perfetto"


OUTPUT, TITLE = "flops_profiler.output_file", "FLOPs of step "  # the key, and the begin of what it names


class Profiles:
    """The profiles of one engine.

    - `profiler` traces chosen steps.
    - `wall_clock_breakdown` profiles the first step with a progress line, except the run's first: only once, because a
      profile may take longer than the step.
    - `comms_logger` profiles the second step, on GPUs.
    - `flops_profiler` prints the FLOPs of step `profile_step`, and times it. The first step of a process compiles, so
      the second takes its place, and that of `profile_step` in a run that resumes after it.

    Attributes:
      device, comms: the profiles of the breakdown and of the collectives; None before them.
      times: of the parts of the step that was profiled; None before it.
    """

    def __init__(self, config: Config):
        self._config, self._flops, self._comms = config, config.flops_profiler, config.comms_logger
        self.device: Profile | None = None
        self.comms: Profile | None = None
        self.times: DeviceTimes | None = None
        self._trace = Trace(config.profiler)
        self._timed = self._flops.profile_step if self._flops.enabled else None
        self._logged = not self._comms.enabled
        self._seconds, self._first = 0.0, 0

    @contextlib.contextmanager
    def around(
        self, number: int, part: Callable[[], AbstractContextManager[object]], *, line_due: bool
    ) -> Iterator[bool]:
        """Profile a step, if it is its turn; `part` is the context in which that counts as the profile's time.

        Args:
          line_due: whether the breakdown has a line after this step.

        Yields:
          Whether the results of the step must be waited for.
        """
        self._first = self._first or number
        if self._timed is not None and (self._first == number == self._timed or number > self._timed):
            self._timed = number + 1
        profile = self._profile(number, line_due)
        ends = profile is not None and not (profile is self._trace and number < self._trace.last)
        if profile:
            with part():
                profile.start()
        start = time.perf_counter()
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                # The step before the timed one too, so that the clock does not start while it runs.
                yield ends or (self._timed is not None and number in (self._timed - 1, self._timed))
        finally:
            self._seconds = time.perf_counter() - start
            if profile and ends:
                with part():
                    profile.stop()

    def _profile(self, number: int, line_due: bool) -> Profile | Trace | None:
        """Return the profile that a step is for."""
        if self._trace.contains(number):
            return self._trace
        if number in (self._first, self._timed):
            return None
        if line_due and self.device is None:
            self.device = Profile()
            return self.device
        if not self._logged and self.comms is None and _on_gpus():
            self.comms = Profile()
            return self.comms
        return None

    def texts(self, number: int, step: TrainStep) -> Iterator[str]:
        """Yield what process 0 prints after a step. All processes call it, because reading a program may compile it."""
        reads = number == self._timed or not self._logged or (self.device and self.device.is_new)
        traced = step.traced if reads else None  # which takes a part of a millisecond, so not in every step
        if self._trace.contains(number) and (number == self._trace.last or self._trace.problem):
            yield self._trace.line()
            self._trace.last = -1
        if traced is None:
            return
        if number == self._timed:
            self._timed = None
            yield _tried("flops_profiler", lambda: self._flops_text(number, step, traced))
        if not self._logged and (self.comms or not _on_gpus()):
            self._logged = True
            yield _tried("comms_logger", lambda: self._comms_text(step, traced))
        if (profile := self.device) and profile.is_new:
            profile.is_new = False
            yield _tried("wall_clock_breakdown", lambda: self._device_text(number, traced, profile))

    def _device_text(self, number: int, traced: jax.stages.Traced, profile: Profile) -> str:
        text = traced.lower().compile().as_text() or ""
        if profile.problem:
            return f"step {number}: no profile of the device: {profile.problem}"
        self.times = device_times(profile.kernels, parts_of_instructions(text))
        return device_line(number, self.times)

    def _flops_text(self, number: int, step: TrainStep, traced: jax.stages.Traced) -> str:
        section, found = self._flops, step_flops(step, traced)
        title = f"{TITLE}{number}: matmuls on one of {found.devices} devices"
        top = None if section.detailed else section.top_modules
        drawn = found.table(title, section.module_depth, top, plain=section.output_file is not None)
        device = jax.local_devices()[0]
        kind = device.device_kind if _on_gpus() else "cpu"
        text = "\n".join([drawn, *found.totals(self._seconds, kind)])
        return _written(text, section.output_file, title) if section.output_file else text

    def _comms_text(self, step: TrainStep, traced: jax.stages.Traced) -> str:
        section, profile, found = self._comms, self.comms, collectives(traced.lower().compile(), step.mesh)
        kinds = KINDS if section.prof_all else tuple(kind for kind in KINDS if kind in section.prof_ops)
        text = communication(
            found, kinds, each=section.verbose, names=section.debug, kernels=profile.kernels if profile else ()
        )
        return f"{text}\nno bandwidth: {profile.problem}" if profile and profile.problem else text


def _tried(section: str, draw: Callable[[], str]) -> str:
    """Return what `draw` returns, or why it failed: a table must not end the run."""
    try:
        return draw()
    except Exception as error:  # of a program with a form that no reader knows
        return f"{section}: no table: {with_type(error)}"


def _on_gpus() -> bool:
    return jax.local_devices()[0].platform != "cpu"


def check_output_file(file: str | Path) -> None:
    """Raise a ConfigError if the table would replace a file that jzero did not write."""
    mine = False
    with contextlib.suppress(OSError):
        mine = not Path(file).is_symlink() and read_file(file, len(TITLE)) == TITLE.encode()
    if not mine and os.path.lexists(file):
        raise ConfigError(f"{OUTPUT} = {str(file)!r}: is not a table that jzero wrote; name another file, or remove it")


def _written(text: str, file: str, title: str) -> str:
    """Write a text to a file on process 0; return a line with the path."""
    if jax.process_index():
        return ""
    try:
        check_output_file(file)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with create(file) as stream:
            stream.write(text + "\n")
    except ConfigError as error:
        return f"{text}\n{error}"
    except OSError as error:  # a profile must not end the run
        return f"{text}\n{OUTPUT} = {file!r}: not written: {error}"
    return f"{title}: written to {file}"
