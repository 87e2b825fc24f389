"""A trace of chosen steps for XProf and Perfetto."""

from __future__ import annotations

import atexit
from pathlib import Path

import jax

from jzero.config.observed import ProfilerConfig


class Trace:
    """A trace of the steps from `first` to `last`, in files below `output_path`.

    Attributes:
      problem: why there is none.
      directory: of this process; "" if it writes none.
    """

    def __init__(self, section: ProfilerConfig):
        self.first, self.last = section.steps or (0, -1)
        self._python, self.problem, self.is_running = section.python, "", False
        writes = section.all_processes or jax.process_index() == 0
        # XProf names a file after its host, so processes of one host need a directory each.
        own = f"process_{jax.process_index()}" if section.all_processes and jax.process_count() > 1 else ""
        self.directory = str(Path(section.output_path) / own) if writes else ""

    def contains(self, step: int) -> bool:
        """Return whether a step is traced."""
        return self.first <= step <= self.last

    def start(self) -> None:
        """Start before the first of the steps that this run takes."""
        if self.is_running or self.problem or not self.directory:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._python)
        try:
            jax.profiler.start_trace(self.directory, profiler_options=options)
        except (RuntimeError, OSError) as error:  # the script profiles
            self.problem = str(error)
            return
        self.is_running = True
        atexit.register(self.stop)  # a run that ends before the last step

    def stop(self) -> None:
        """Write the files."""
        if self.is_running:
            self.is_running = False
            atexit.unregister(self.stop)
            try:
                jax.profiler.stop_trace()
            except (RuntimeError, OSError) as error:  # a full disk must not end the run
                self.problem = str(error)

    def line(self) -> str:
        """Say where the files are."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        if self.problem:
            return f"{steps}: no trace: {self.problem}"
        return f"{steps}: traced to {self.directory}; open it with xprof, or its .trace.json.gz in Perfetto"
