"""Plans a train step for GPUs that need not be there: compiles it, and reads memory, collectives and time from it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jzero.batch import amount_of
from jzero.config import Config
from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError
from jzero.mesh import make_mesh
from jzero.model import Model
from jzero.planner import gpus
from jzero.planner.advice import advice
from jzero.planner.collectives import collectives
from jzero.planner.deepspeed_estimate import deepspeed_estimate
from jzero.planner.gathered_sequences import gathered_sequences
from jzero.planner.memory import memory
from jzero.planner.moves import across_hosts, moves, whole_sequences
from jzero.planner.plan_facts import PlanFacts
from jzero.planner.plan_page import write_page
from jzero.planner.plan_record import plan_record
from jzero.planner.plan_text import plan_text
from jzero.planner.plan_time import PlannedTime
from jzero.planner.planned_memory import planned_memory
from jzero.planner.products import products
from jzero.planner.rates import Rates
from jzero.planner.room import Room
from jzero.planner.state_bytes import host_reads
from jzero.planner.step_time import step_time
from jzero.planner.undivided import undivided
from jzero.planner.useful_flops import useful_flops
from jzero.setup import with_stages
from jzero.train_step import TrainStep, make_train_step
from jzero.tree import PyTree


class Plan(PlanFacts):
    """A plan: `print(plan)` shows it, `plan.record()` returns it as JSON values, `plan.html(path)` writes a page.

    `PlanFacts` has the attributes: memory, collectives, time, warnings, ...
    """

    def record(self, tokens: float | None = None, price: float | None = None) -> dict[str, Any]:
        """Return everything as JSON values; docs/plan.md documents the keys.

        Args:
          tokens: a budget to add, as for `PlannedTime.budget`.
          price: of one GPU for one hour.
        """
        return plan_record(self, tokens, price)

    def html(self, path: str | os.PathLike, tokens: float | None = None, price: float | None = None) -> None:
        """Write one page that refers to nothing else; arguments as for `record`.

        Raises:
          ConfigError: matplotlib is not installed.
        """
        write_page(self, path, tokens, price)

    def __repr__(self) -> str:
        speed = f", {1000 * self.time.step_s:.4g} ms a step" if self.time else ""
        return f"Plan({self.gpus} x {self.gpu.description}, {self.memory.verdict}{speed})"

    def __str__(self) -> str:
        return plan_text(self)


def plan(
    step_or_model: TrainStep | Model,
    config: Config | dict | str | None = None,
    batch_shapes: PyTree | Callable[[int], PyTree] = None,
    *,
    gpu: str = "h200",
    nodes: int = 1,
    gpus_per_node: int = 8,
    rates: Rates | None = None,
    optimizer: Any = None,
) -> Plan:
    """Compile a train step for GPUs that need not be there, and read its memory, collectives and time.

    The program is the one that will run: the planned GPUs decide where the model's attention is "auto". Without a GPU,
    set JAX_PLATFORMS=cpu before JAX starts, and install the extra `plan`.

    Args:
      step_or_model: a model as for `make_train_step`, or a `TrainStep`, which is made again for the planned GPUs.
      config: as for `make_train_step`; default: the step's.
      batch_shapes: a global batch, as ShapeDtypeStructs or arrays; or a function of its size that makes one.
      gpu: a key of `jzero.planner.GPUS`.
      nodes, gpus_per_node: the cluster.
      rates: of the GPUs, as `jzero calibrate` measures them; default: `Rates.of(gpu)`.
      optimizer: as for `make_train_step`; a step that was made with one of the caller's needs it again.

    Raises:
      ConfigError: an unknown GPU, a config that does not fit the GPUs, the batch or itself, no CUDA compiler.
    """
    return prepare(
        step_or_model, config, batch_shapes, gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node, optimizer=optimizer
    ).plan(rates)


@dataclass(frozen=True)
class Prepared:
    """A step that is traced and lowered for GPUs that need not be there; `plan` compiles it.

    Attributes:
      step, gpu, nodes, gpus_per_node: as in a `Plan`.
      kind: the GPU's key of `GPUS`.
      batch: the shapes of a global batch.
      seconds: of tracing and lowering.
    """

    step: TrainStep
    kind: str
    nodes: int
    gpus_per_node: int
    batch: PyTree
    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    seconds: float

    @property
    def gpu(self) -> gpus.GPU:
        return gpus.gpu(self.kind)

    def plan(self, rates: Rates | None = None) -> Plan:
        """Compile the step and read it; `rates` as for `plan`."""
        step, start = self.step, time.monotonic()
        with slow_work(f"compiling the step for {step.mesh.size} x {self.gpu.description}"), no_compilation_cache():
            compiled = self.lowered.compile()
        return read_plan(
            step, compiled, self.traced, self.batch, self.gpu, self.nodes, self.gpus_per_node,
            self.gpu.room(step.mesh.size), Rates.of(self.kind) if rates is None else rates,
            self.seconds + time.monotonic() - start,
        )  # fmt: skip


def read_plan(
    step: TrainStep, compiled: jax.stages.Compiled, traced: jax.stages.Traced, batch: PyTree, gpu: gpus.GPU, nodes: int,
    gpus_per_node: int, there: Room, rates: Rates, seconds: float,
) -> Plan:  # fmt: skip
    """Read the memory, collectives and time of a compiled step.

    Args:
      traced, batch: its trace, and the shapes of its global batch.
      gpu, nodes, gpus_per_node, there, rates: its devices, what they have for XLA, and their rates.
      seconds: that tracing and compiling took.
    """
    text, amount, count = compiled.as_text() or "", amount_of(batch), step.mesh.size
    found, half = collectives(text, step.mesh), step.config.precision != "fp32"
    planned, problem, moved = None, "", moves(traced, step.mesh)
    try:
        timed = step_time(
            text, rates, mesh=step.mesh, gpus_per_node=gpus_per_node, host_bytes=step.host_bytes,
            host_reads=host_reads(step),
        )  # fmt: skip
        origin, useful = f"{rates.origin}: {rates.source}", useful_flops(step, traced, batch)
        planned = PlannedTime(timed, amount, useful, gpu, count, nodes, half, origin)
    except ValueError as error:  # a spelling that the reader of the program does not know
        problem = str(error)
    warnings = [
        *advice(step, gpu, text, found, products(traced), amount),
        *whole_sequences(step.model, step.setup.weights, traced, step.mesh),
        *gathered_sequences(moved, step.mesh, step.config.context_parallel.attention),
        *undivided(step),
        *across_hosts(moved, step.mesh),
    ]
    return Plan(
        step, gpu, nodes, gpus_per_node, amount, planned_memory(step, memory(compiled, step), text, there), found,
        moved, planned, problem, tuple(warnings), deepspeed_estimate(step), text, seconds,
    )  # fmt: skip


def prepare(
    step_or_model: TrainStep | Model,
    config: Config | dict | str | None = None,
    batch_shapes: PyTree | Callable[[int], PyTree] = None,
    *,
    gpu: str = "h200",
    nodes: int = 1,
    gpus_per_node: int = 8,
    optimizer: Any = None,
) -> Prepared:
    """Trace and lower a step for GPUs that need not be there; arguments and errors are those of `plan`."""
    gpus.gpu(gpu)
    model, config, optimizer = _what(step_or_model, config, optimizer)
    if batch_shapes is None:
        raise ConfigError("batch_shapes: missing; pass the shapes of a global batch, or a function of its size")
    devices = gpus.gpu_devices(gpu, nodes * gpus_per_node, per_host=gpus_per_node)
    mesh, start = make_mesh(with_stages(config, model, None), devices=devices), time.monotonic()
    with slow_work("tracing the step"), no_compilation_cache():
        step = make_train_step(model, config, mesh=mesh, optimizer=optimizer)
        batch = batch_shapes(step.batch_sizes.train) if callable(batch_shapes) else batch_shapes
        traced = step.trace(batch)
        lowered = traced.lower()
    return Prepared(step, gpu, nodes, gpus_per_node, batch, traced, lowered, time.monotonic() - start)


def _what(step_or_model: Any, config: Any, optimizer: Any) -> tuple[Model, Config, Any]:
    if not isinstance(step_or_model, TrainStep):
        return step_or_model, Config.load({} if config is None else config), optimizer
    if step_or_model.setup.callers_optimizer and optimizer is None:
        raise ConfigError("optimizer: the step was made with one of your own; pass it to plan too")
    return step_or_model.model, Config.load(step_or_model.config if config is None else config), optimizer


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Keep programs for absent GPUs out of JAX's cache, which cannot read them back.

    JAX asks once in a process whether there is a cache, and so does not write programs that compile in less than a
    number of seconds; both are set.
    """
    names = {"jax_enable_compilation_cache": False, "jax_persistent_cache_min_compile_time_secs": 1e9}
    former = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in former.items():
            jax.config.update(name, value)
