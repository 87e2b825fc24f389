"""The figures of a choice: its step is compiled in a process of its own, once per program, and a cache keeps them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jzero._compat import terminate
from jzero.config import Config
from jzero.distributed.host_memory import memory_gb
from jzero.errors import in_a_line
from jzero.files import kept
from jzero.planner.choices import Choice
from jzero.planner.named_models import Shapes, named_model
from jzero.planner.plan import Prepared, prepare
from jzero.planner.rates import Rates

PROCESS_BYTES = 3 * 2**30  # of host memory that a compiling process takes, at most about


@dataclass(frozen=True)
class Task:
    """A model on a cluster; picklable, so that other processes can make its steps.

    Attributes:
      model, sequence, changes: as for `named_model`.
      gpu, nodes, gpus_per_node: the cluster.
      rates: of its GPUs.
    """

    model: str
    sequence: int
    changes: tuple[str, ...]
    gpu: str
    nodes: int
    gpus_per_node: int
    rates: Rates

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def named(self) -> tuple[Any, Shapes]:
        """Make the model, and the function from the global batch size to the shapes of a batch."""
        return named_model(self.model, self.sequence, self.changes)


@dataclass(frozen=True)
class Outcome:
    """The planned figures of a choice, per GPU; see `PlannedMemory` and `PlannedTime`.

    Attributes:
      choice: of the keys that the config leaves open.
      peak_bytes, usable_bytes, host_bytes: what the step needs, what the GPU has for XLA, and host memory.
      step_s, samples_per_s, tokens_per_s_gpu, mfu, uncertainty: the speed; None if the estimate cannot read the
        program.
      problem: why there is no speed, or, without a peak, why there is no program.
    """

    choice: Choice
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

    @property
    def margin_bytes(self) -> int:
        """Bytes that are left on the GPU at the peak."""
        return self.usable_bytes - self.peak_bytes


def outcome(task: Task, raw: Mapping[str, Any], choice: Choice) -> Outcome:
    """Compile the step of a config, or look its program up in the cache.

    Args:
      raw: the whole config, with the choice in it.
    """
    model, shapes = task.named()
    there: dict[str, Any] = {"gpu": task.gpu, "nodes": task.nodes, "gpus_per_node": task.gpus_per_node}
    try:
        prepared = prepare(model, Config.load(dict(raw)), shapes, **there)
        path = _cached(prepared, task.rates)
        if path.exists():
            return Outcome(choice, **json.loads(path.read_text(encoding="utf-8")))
        found = _read(prepared, task.rates)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:  # the model's, or XLA's
        return Outcome(choice, problem=in_a_line(error))
    with contextlib.suppress(OSError):  # a cache that cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(path)
    return Outcome(choice, **found)


def _read(prepared: Prepared, rates: Rates) -> dict[str, Any]:
    plan = prepared.plan(rates)
    memory, time = plan.memory, plan.time
    found = {"peak_bytes": memory.peak_bytes, "usable_bytes": memory.room.most, "host_bytes": memory.host_bytes}
    if time is None:
        return found | {"problem": plan.time_problem}
    names = ("step_s", "samples_per_s", "tokens_per_s_gpu", "mfu", "uncertainty")
    return found | {name: getattr(time, name) for name in names}


def _cached(prepared: Prepared, rates: Rates) -> Path:
    """Return the path of a program's figures: they depend on the program, the GPUs and the planner itself."""
    limit, options = prepared.gpu.room(prepared.step.mesh.size).limit, prepared.step.setup.compiler_options
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("XLA_")}
    where = (
        f"{prepared.kind} {prepared.nodes} {prepared.gpus_per_node} {limit} {options} {settings} {rates!r} {_planner()}"
    )
    key = hashlib.sha256((where + prepared.lowered.as_text()).encode()).hexdigest()
    return kept("plans") / f"{key[:32]}.json"


@cache
def _planner() -> str:
    """Return what identifies the planner and the compiler."""
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"{hashlib.sha256(source).hexdigest()} jax {version('jax')} jaxlib {version('jaxlib')}"


class Pool:
    """Processes that compile; a context manager."""

    def __init__(self, processes: int | None = None):
        self.size = processes or default_processes()
        self._pool = ProcessPoolExecutor(self.size, get_context("spawn"), _start)

    def submit(self, task: Task, raw: Mapping[str, Any], choice: Choice) -> Future[Outcome]:
        """Begin to compile a config; `choice` is in it."""
        return self._pool.submit(outcome, task, raw, choice)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *failure: object) -> None:
        terminate(self._pool)  # a compilation cannot be cancelled


def default_processes() -> int:
    """Return one process per core of this job, as far as its memory goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, memory_gb() * 2**30 // PROCESS_BYTES))


def _start() -> None:
    """Start JAX without GPUs, and without what its CUDA plugin logs about the missing driver."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    import jax

    jax.config.update("jax_platforms", "cpu")
