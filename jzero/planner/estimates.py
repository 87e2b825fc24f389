"""The figures of a candidate: a process of its own compiles its step, once per program, and a cache keeps them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jzero._compat import terminate
from jzero.distributed.machine import memory_gb
from jzero.errors import in_a_line
from jzero.files import cache_directory
from jzero.planner.candidates import Candidate, Task, merged
from jzero.planner.plan import Prepared, lower_step
from jzero.planner.rates import Rates

PROCESS_BYTES = 3 * 2**30  # of host memory that a compiling process takes, at most about


@dataclass(frozen=True)
class Estimate:
    """The planned figures of a candidate, per GPU; see `PlannedMemory` and `PlannedTime`.

    Attributes:
      candidate: of the keys that the config leaves open.
      peak_bytes, usable_bytes, host_bytes: what the step needs, what the GPU has for XLA, and host memory.
      step_s, samples_per_s, tokens_per_s_gpu, mfu, uncertainty: the speed; None if the estimate cannot read the
        program.
      problem: why there is no speed, or, without a peak, why there is no program.
    """

    candidate: Candidate
    peak_bytes: int = 0
    usable_bytes: int = 0
    host_bytes: int = 0
    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s_gpu: float | None = None
    mfu: float | None = None
    uncertainty: float | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return 0 < self.peak_bytes <= self.usable_bytes


def estimate(task: Task, candidate: Candidate) -> Estimate:
    """Compile the step of a task's config with a candidate in it, or look its program up in the cache."""
    model, shapes = task.named
    try:
        prepared = lower_step(model, merged(task.raw, candidate), shapes, task.cluster)
        path = _cached(prepared, task.rates)
        if path.exists():
            return Estimate(candidate, **json.loads(path.read_text(encoding="utf-8")))
        plan = prepared.plan(task.rates)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:  # the model's, or XLA's
        return Estimate(candidate, problem=in_a_line(error))
    memory, names = plan.memory, ("step_s", "samples_per_s", "tokens_per_s_gpu", "mfu", "uncertainty")
    found: dict[str, Any] = {"peak_bytes": memory.peak_bytes, "usable_bytes": memory.usable.most}
    found |= {name: getattr(plan.time, name) for name in names} if plan.time else {"problem": plan.time_problem}
    found["host_bytes"] = memory.host_bytes
    with contextlib.suppress(OSError):  # a cache that cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(path)
    return Estimate(candidate, **found)


def _cached(prepared: Prepared, rates: Rates) -> Path:
    """Return the path of a program's figures: they depend on the program, the GPUs and the planner itself."""
    cluster, options = prepared.cluster, prepared.step.setup.compiler_options
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("XLA_")}
    where = f"{cluster!r} {cluster.usable.limit} {options} {settings} {rates!r} {_planner()}"
    key = hashlib.sha256((where + prepared.lowered.as_text()).encode()).hexdigest()
    return cache_directory("plans") / f"{key[:32]}.json"


@cache
def _planner() -> str:
    """Return what identifies the planner and the compiler."""
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"{hashlib.sha256(source).hexdigest()} jax {version('jax')} jaxlib {version('jaxlib')}"


class Pool(ProcessPoolExecutor):
    """Processes that compile: one per core of this job, as far as its memory goes."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.size = max(1, min(cores, memory_gb() * 2**30 // PROCESS_BYTES))
        super().__init__(self.size, get_context("spawn"), _start)

    def __exit__(self, *failure: object) -> None:
        terminate(self)  # a compilation cannot be cancelled


def _start() -> None:
    """Start JAX without GPUs, and without what its CUDA plugin logs about the missing driver."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    import jax

    jax.config.update("jax_platforms", "cpu")
