"""Plans a train step for GPUs that need not be there: compiles it, and reads memory, collectives and time from it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import jax
import optax

from jzero.config import Config
from jzero.display.page import document
from jzero.display.slow_work import slow_work
from jzero.distributed.joining import host_of
from jzero.errors import ConfigError
from jzero.mesh import PIPE, group_size, make_mesh, resolve_mesh
from jzero.model import Model
from jzero.pictures import html
from jzero.planner.advice import advice, group_advice, undivided_parameters
from jzero.planner.collectives import collectives
from jzero.planner.gpus import Cluster, gpu_key
from jzero.planner.memory import UsableMemory, usable_memory_here
from jzero.planner.plan_display import plan_html, plan_text, plan_title
from jzero.planner.plan_facts import Measured, PlanFacts, PlannedTime, budget_of, planned_memory
from jzero.planner.rates import Rates
from jzero.planner.state_bytes import deepspeed_estimate, host_reads
from jzero.planner.step_time import step_time
from jzero.planner.traced_operations import BACKWARD, FORWARD, Walk, matmuls, moves
from jzero.step.batch import amount_of
from jzero.step.train_step import TrainStep, make_train_step
from jzero.tree import PyTree

Optimizer: TypeAlias = optax.GradientTransformation | Callable[[optax.Schedule], optax.GradientTransformation] | None


class Plan(PlanFacts):
    """A plan: `print(plan)` and notebooks show it, `plan.record()` gives JSON values, `plan.html(path)` writes a page.

    `PlanFacts` has the attributes: memory, collectives, time, warnings, ...
    """

    def html(self, path: str | os.PathLike, tokens: float | None = None, price: float | None = None) -> None:
        """Write one page that refers to nothing else; arguments as for `record`.

        Raises:
          ConfigError: matplotlib is not installed.
        """
        page = document(plan_title(self).splitlines()[0], plan_html(self, budget_of(self, tokens, price)))
        Path(path).expanduser().write_text(page, encoding="utf-8")

    def __repr__(self) -> str:
        speed = f", {1000 * self.time.step_s:.4g} ms a step" if self.time else ""
        return f"Plan({self.gpus} x {self.gpu.description}, {self.memory.verdict}{speed})"

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        """Show the page in a notebook; without matplotlib, the text."""
        try:
            return plan_html(self)
        except ConfigError:
            return html.text(str(self))


def plan(
    step_or_model: TrainStep | Model,
    config: Config | dict | str | None = None,
    batch_shapes: PyTree | Callable[[int], PyTree] = None,
    *,
    gpu: str = "h200",
    nodes: int = 1,
    gpus_per_node: int = 8,
    rates: Rates | None = None,
    optimizer: Optimizer = None,
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
    return lower_step(step_or_model, config, batch_shapes, Cluster(gpu, nodes, gpus_per_node), optimizer).plan(rates)


@dataclass(frozen=True)
class Prepared:
    """A step that is traced and lowered for GPUs that need not be there; `plan` compiles it.

    Attributes:
      batch: the shapes of a global batch.
      seconds: of tracing and lowering.
    """

    step: TrainStep
    cluster: Cluster
    batch: PyTree
    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    seconds: float

    def plan(self, rates: Rates | None = None) -> Plan:
        """Compile the step and read it; `rates` as for `plan`."""
        start, rates = time.monotonic(), Rates.of(self.cluster.gpu) if rates is None else rates
        with slow_work(f"compiling the step for {self.cluster}"), no_compilation_cache():
            compiled = self.lowered.compile()
        seconds = self.seconds + time.monotonic() - start
        return replace(read_plan(self, compiled, self.cluster.usable, rates), compile_s=seconds)


def read_plan(prepared: Prepared, compiled: jax.stages.Compiled, there: UsableMemory, rates: Rates) -> Plan:
    """Read the memory, collectives and time of a compiled step; `there` is what its devices have for XLA."""
    step, traced, cluster = prepared.step, prepared.traced, prepared.cluster
    text, amount, gpu = compiled.as_text() or "", amount_of(prepared.batch), cluster.card
    found, half = collectives(text, step.mesh), step.config.precision != "fp32"
    planned, problem, moved = None, "", moves(traced, step.mesh)
    try:
        timed = step_time(
            text, rates, mesh=step.mesh, gpus_per_node=cluster.gpus_per_node, host_bytes=step.host_bytes,
            host_reads=host_reads(step),
        )  # fmt: skip
        origin, useful = f"{rates.origin}: {rates.source}", useful_flops(step, traced, prepared.batch)
        planned = PlannedTime(timed, amount, useful, cluster, half, origin)
    except ValueError as error:  # a spelling that the reader of the program does not know
        problem = str(error)
    warnings = [
        *advice(step, gpu, text, found, matmuls(traced), amount),
        *group_advice(step, traced, moved),
        *undivided_parameters(step),
    ]
    return Plan(
        step=step, gpu=gpu, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node, amount=amount,
        memory=planned_memory(step, compiled, there), collectives=found, moves=moved, time=planned,
        time_problem=problem, warnings=tuple(warnings), deepspeed_bytes=deepspeed_estimate(step), text=text,
        compile_s=0.0,
    )  # fmt: skip


def lower_step(
    step_or_model: TrainStep | Model, config: Config | dict | str | None,
    batch_shapes: PyTree | Callable[[int], PyTree], cluster: Cluster, optimizer: Optimizer = None,
) -> Prepared:  # fmt: skip
    """Trace and lower a step for GPUs that need not be there; arguments and errors are those of `plan`."""
    model = step_or_model
    if isinstance(model, TrainStep):
        if model.setup.optimizer.callers and optimizer is None:
            raise ConfigError("optimizer: the step was made with one of your own; pass it to plan too")
        config, model = model.config if config is None else config, model.model
    config = Config.load({} if config is None else config)
    if batch_shapes is None:
        raise ConfigError("batch_shapes: missing; pass the shapes of a global batch, or a function of its size")
    (config, mesh), start = resolve_mesh(config, model, devices=cluster.devices()), time.monotonic()
    with slow_work("tracing the step"), no_compilation_cache():
        step = make_train_step(model, config, mesh=mesh, optimizer=optimizer)
        batch = batch_shapes(step.batch_sizes.train) if callable(batch_shapes) else batch_shapes
        traced = step.trace(batch)
        lowered = traced.lower()
    return Prepared(step, cluster, batch, traced, lowered, time.monotonic() - start)


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


def observed(step: TrainStep, step_s: float | None = None, rates: Rates | None = None) -> Plan:
    """Read the program of a step that ran, from JAX's cache.

    Args:
      step_s: measured seconds of a step.
      rates: of its GPUs, as for `plan`.

    Raises:
      ConfigError: the step did not run yet, or its devices are not in `GPUS`.
    """
    if step.first is None:
        raise ConfigError("html: the step did not run yet; call it once, or plan it with jzero.plan")
    traced, devices = step.first.traced(), list(step.mesh.devices.flat)
    nodes = len({host_of(device) for device in devices})
    cluster = Cluster(gpu_key(devices[0]), nodes, len(devices) // nodes)
    prepared = Prepared(step, cluster, step.first.batch_shapes, traced, traced.lower(), 0.0)
    there, rates = usable_memory_here() or cluster.usable, rates or Rates.of(cluster.gpu)
    plan = read_plan(prepared, prepared.lowered.compile(), there, rates)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    return replace(plan, measured=Measured(step_s, max(peaks)))


def useful_flops(step: TrainStep, traced: jax.stages.Traced, batch: PyTree) -> float | None:
    """Compute the useful FLOPs of one step on one device (Chowdhery et al., arXiv:2204.02311, appendix B).

    A pipeline's devices compute in idle ticks too, and a group's devices some things all alike, so their model is
    traced once more, on one device.

    Args:
      traced: the step's trace for the global batch `batch`.

    Returns:
      None for a `PipelineModule` of a fixed number of stages, which one device cannot run.
    """
    if step.mesh.shape[PIPE] == group_size(step.mesh) == 1:
        return _count(traced)
    if getattr(step.model, "num_stages", None):
        return None
    micro = step.batch_sizes.micro
    alone: dict[str, object] = {
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "trainable_parameters": step.config.trainable_parameters,
        "frozen_parameters": step.config.frozen_parameters,
    }
    if step.config.precision != "fp32":
        alone[step.config.precision] = {"enabled": True}
    mesh = make_mesh(devices=[step.mesh.devices.flat[0]])
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((micro, *x.shape[1:]), x.dtype), batch)
    one = make_train_step(step.model, {k: v for k, v in alone.items() if v}, mesh=mesh)
    return _count(one.trace(rows)) * step.batch_sizes.accum * step.replicas / step.mesh.size


def _count(traced: jax.stages.Traced) -> float:
    return sum(product.flops for product in Walk(traced).found if product.part in (FORWARD, BACKWARD))
