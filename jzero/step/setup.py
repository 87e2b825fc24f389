"""A config resolved for a model and devices: everything that is decided before a program is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero import optimizers
from jzero._compat.kernels import allow_float16_products_on_cpu
from jzero.config import Config
from jzero.config.sizes import BatchSizes
from jzero.errors import ConfigError, both
from jzero.layout import offload, sharding, zeropp
from jzero.layout.sharding import PlacedModel
from jzero.layout.zero import Rule, stage_rule
from jzero.mesh import EXPERT, PIPE, TENSOR, batch_spec, is_gpu, replicas, resolve_mesh
from jzero.model import Model, ModelFacts, check_model
from jzero.optimizers import lr_schedules, transforms
from jzero.optimizers.stack_probe import stack_warning
from jzero.passes.gradients import DeviceFunctions
from jzero.passes.sequential import Passes, Read, sequential
from jzero.pipeline.stages import pipelined
from jzero.precision import Precision, check_fp8, settle_precision
from jzero.spread.dimension_search import with_found_dimensions
from jzero.spread.division import check_tables, divisions_by_axis, with_layer_specs
from jzero.tracing.fp8_weights import Noted, large_weights
from jzero.tree import PyTree, cast, partition
from jzero.values.kinds import INT32
from jzero.values.parameters import Total, is_auto

TotalSteps = int | Callable[[int], Total | None] | None

# Measured on 4 x H200 (experiments/benchmarks): cuBLAS instead of Triton matrix products +5 %, and larger combined
# collectives under the scheduler that overlaps them +2 %.
GPU_COMPILER_OPTIONS: dict[str, bool | int | float | str] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * 2**20,
}


@dataclass(frozen=True)
class StepOptimizer:
    """The optimizer of a step.

    Attributes:
      tx: the transformation of gradients.
      schedule: the learning rate over the applied steps; None if the caller's optimizer does not expose it.
      groups: its parameter groups; the last one has the parameters that the config's groups leave over.
      callers: whether the caller passed it in.
      warning: why a caller's optimizer is not what it seems; "" if it is.
    """

    tx: optax.GradientTransformationExtraArgs
    schedule: Any
    groups: tuple[optimizers.Group, ...]
    callers: bool
    warning: str


@dataclass(frozen=True)
class Setup(PlacedModel):
    """A config resolved for one model on one mesh.

    Attributes:
      batch_sizes: global batch, micro-batch per replica, accumulation.
      plus: the parts of ZeRO++ that the config turns on.
      weight_shapes: shapes of the parameters, in the compute dtype.
      optimizer: the transformation of gradients, its schedule and groups.
      passes: how the forward and backward passes run.
      searched: whether the config's `tensor_parallel.dimensions` was found by trying.
      unfit: parameter -> the dimension of the model's table that `tensor` does not divide, see `spread.division`.
      fp8: which weights are multiplied in fp8, known once a step is traced.
    """

    batch_sizes: BatchSizes
    plus: zeropp.ZeroPlusPlus
    weight_shapes: PyTree
    optimizer: StepOptimizer
    passes: Passes
    searched: bool
    unfit: Mapping[str, int | None]
    fp8: Noted = field(default_factory=Noted)

    @property
    def rule(self) -> Rule:
        """The ZeRO rule of the stage, as the pipeline's `gather` modifies it."""
        return stage_rule(self.config.zero_optimization.stage, self.config.pipeline.gather == "step", self.plus)

    @property
    def histories(self) -> dict[str, PartitionSpec]:
        """The specs of the histories of weights that may be multiplied in fp8; see `kernels.fp8.delayed_scaling`."""
        section, names = self.config.fp8, getattr(self.model, "names", None)
        if not section.enabled or section.recipe != "delayed":
            return {}
        layouts = jax.tree.leaves(self.layouts)
        large = large_weights(section, layouts, names)
        # [L, 3, steps]: divided as the layer axis of the weight, so by `pipe` alone.
        trained = (layout for layout in layouts if layout.trainable and layout.name in large)
        return {layout.name: PartitionSpec(*layout.spec[:1]) for layout in trained}

    @property
    def gradient_names(self) -> list[tuple[str, int]]:
        """The names of the trained parameters in checkpoints, each with the index of the gradient's leaf."""
        trained = [layout.name for layout in jax.tree.leaves(self.layouts) if layout.trainable]
        names = getattr(self.model, "names", None)
        return [(name, i) for i, name in enumerate(trained)] if names is None else names.in_order(trained)

    @property
    def compiler_options(self) -> dict[str, bool | int | float | str]:
        """Those of the devices, and those of the config, which win."""
        own: dict[str, bool | int | float | str] = {}
        if is_gpu(self.mesh):
            # The profile of a step does not know which operation the kernels of a CUDA graph belong to.
            graphs = {"xla_gpu_enable_command_buffer": ""} if self.config.wall_clock_breakdown else {}
            own = {**GPU_COMPILER_OPTIONS, **graphs}
            if self.config.fp8.enabled:
                # It joins small products of one activation before XLA knows that they are in fp8, and leaves bf16.
                own["xla_gpu_dot_merger_threshold_mb"] = 0
            if self.mesh.size == 1:
                # Without collectives it hides nothing. Under offload it delays the products of the weights' gradients
                # for the sake of the copies: 12.7 instead of 4.9 GiB (Llama 1b, H100, jax 0.11.2).
                own["xla_gpu_enable_latency_hiding_scheduler"] = False
        return {**own, **self.config.compiler_options}

    @property
    def jit(self) -> Callable:
        """`jax.jit` with the compiler options."""
        return partial(jax.jit, compiler_options=self.compiler_options or None)

    @property
    def rows(self) -> int:
        """The rows of a micro-batch on the devices that act as one."""
        return self.batch_sizes.micro * self.mesh.shape[EXPERT]

    @property
    def region(self) -> DeviceFunctions:
        """The manual region of the model."""
        return DeviceFunctions(self, self.weight_shapes, self.passes, self.rows, self.fp8)

    def manual(self, f: Callable, *rest: Any, out_specs: Any) -> Callable:
        """Map `f(params, batch, ...)` over the mesh, manual on every axis; `rest`: the specs of what follows."""
        # Manual on every axis: collectives are then those that the layouts name, none is inserted, and kernels with a
        # partitioner of their own (cuDNN's attention) see plain local arrays. Unchecked, since kernels and custom
        # gradients do not say along which axes their results vary.
        specs: Any = (sharding.specs(self.layouts), batch_spec(self.mesh), *rest)
        return jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)


def resolve(
    model: Model, config: Config, *, mesh: Mesh | None = None, optimizer: Any = None,
    lr_scheduler: optax.Schedule | None = None, former: Mapping[str, Any] | None = None,
    total_num_steps: TotalSteps = None,
) -> Setup:  # fmt: skip
    """Resolve a config for a model on a mesh.

    The arguments are those of `make_train_step`; `former` has the batch sizes of a resumed run, see `Config.batch`.
    `total_num_steps` may be a function of the global batch size.

    Raises:
      ConfigError: a config that does not fit the model, the devices or itself.
    """
    check_model(model)
    check_tables(model)
    offload.allow_pinned(config)  # before JAX starts the devices

    config, mesh = resolve_mesh(config, model, mesh)

    # The model is traced for its shapes alone; no parameter is made before all of this is decided.
    facts = ModelFacts.of(model)
    config = with_layer_specs(config, model, facts.shapes, facts.has_stack)
    given = config.tensor_parallel.dimensions
    config = with_found_dimensions(config, model, mesh, facts.shapes, facts.has_stack)
    searched = given != config.tensor_parallel.dimensions

    config, why = settle_precision(config, facts.shapes, mesh.devices.flat[0])
    precision = Precision.from_config(config, why)
    if float16_on_cpu(precision, mesh):
        allow_float16_products_on_cpu()
    check_fp8(config, precision, mesh.devices.flat[0])

    def placed_on_mesh() -> tuple[PlacedModel, zeropp.ZeroPlusPlus, Mapping[str, int | None], Passes]:
        plus = zeropp.read_zeropp(config.zero_optimization, mesh)
        division = divisions_by_axis(model, facts.shapes, config, mesh, facts.has_stack, searched)
        dims = {axis: of.dims for axis, of in division.items()}
        layouts = sharding.param_layouts(facts, config, mesh, plus, dims)
        layouts = offload.choose_host_state(layouts, config.zero_optimization, mesh)
        placed = PlacedModel(model, config, mesh, layouts, precision)
        return placed, plus, division[TENSOR].unfit, make_passes(placed)

    # Both sets of problems are reported at once.
    batch_sizes, (placed, plus, unfit, passes) = both(lambda: config.batch(replicas(mesh), former), placed_on_mesh)
    if passes.facts.pipeline:
        passes.facts.pipeline(batch_sizes.accum)  # raises for a number of micro-batches that the schedule cannot run
    # After the layouts, which say what is state and keeps its dtype.
    in_use = lambda layout, x: x if layout.state else cast(x, precision.compute)  # noqa: E731
    weight_shapes = jax.eval_shape(partial(jax.tree.map, in_use, placed.layouts), facts.shapes)

    total = total_num_steps(batch_sizes.train) if callable(total_num_steps) else total_num_steps
    schedule = resolve_schedule(config, optimizer, lr_scheduler, total)
    step_optimizer = resolve_optimizer(facts, config, mesh, placed.layouts, precision, optimizer, schedule)
    _check_compiler_options(config, mesh)  # last: it compiles
    return Setup(
        **vars(placed), batch_sizes=batch_sizes, plus=plus, weight_shapes=weight_shapes, optimizer=step_optimizer,
        passes=passes, searched=searched, unfit=unfit,
    )  # fmt: skip


def float16_on_cpu(precision: Precision, mesh: Mesh) -> bool:
    """Return whether a model computes in float16 on simulated devices."""
    return precision.compute == jnp.float16 and mesh.devices.flat[0].platform == "cpu"


def make_passes(placed: PlacedModel, read: Read | None = None) -> Passes:
    """Make the passes of the mesh: through the stages of a pipeline, or in sequence."""
    return (pipelined if placed.mesh.shape[PIPE] > 1 else sequential)(placed, read)


def _check_compiler_options(config: Config, mesh: Mesh) -> None:
    """Raise a ConfigError for options that XLA refuses: on the smallest program, before a large one is traced."""
    if not config.compiler_options:
        return
    try:
        jit = partial(jax.jit, compiler_options=config.compiler_options)
        jit(lambda: 0.0, out_shardings=NamedSharding(mesh, PartitionSpec())).lower().compile()
    except Exception as error:
        raise ConfigError(f"compiler_options = {config.compiler_options}: XLA refuses them: {error}") from None


# ------------------------------------------------------------------ the optimizer of a step, its schedule and groups


def resolve_optimizer(
    facts: ModelFacts, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision, optimizer: Any,
    schedule: lr_schedules.LRSchedule | None,
) -> StepOptimizer:  # fmt: skip
    """Make the config's optimizer for a model's layouts, or take the caller's `optimizer`."""
    leaves = jax.tree.leaves(layouts)
    dims = {leaf.name: len(leaf.shape) - leaf.stacked for leaf in leaves if leaf.trainable}
    frozen = [leaf.name for leaf in leaves if not leaf.trainable]
    groups = optimizers.make_groups(config.optimizer if optimizer is None else None, dims, frozen, facts.names)
    trained, _ = partition(layouts, sharding.trainable(layouts))
    warning = ""
    if optimizer is not None:
        tx = optimizers.callers_optimizer(optimizer, schedule)
        if facts.has_stack and (warning := stack_warning(tx, trained)):
            warnings.warn(warning, stacklevel=2)
    else:
        stacked = jax.tree.map(lambda layout: layout.stacked, trained)
        tx = optimizers.make_optimizer(
            config.optimizer, schedule, stacked=stacked, fused=optimizers.fused_matrices(facts.model, layouts),
            groups=groups, state_dtype=precision.optimizer_state,
            placement=optimizers.Placement(mesh, {x.name: x.spec for x in leaves}),
            compute_dtype=precision.compute,
        )  # fmt: skip
    # The caller's may be any of optax's, also one that takes nothing but gradients.
    tx = optax.with_extra_args_support(tx)  # reduce_on_plateau takes the loss
    if config.ema:
        tx = transforms.with_ema(tx, config.ema.decay)
    return StepOptimizer(tx, schedule, groups, optimizer is not None, warning)


def resolve_schedule(
    config: Config, optimizer: Any, lr_scheduler: Any, total: int | Total | None
) -> lr_schedules.LRSchedule | None:
    """Choose the learning-rate schedule: the caller's, the config's, or None if the caller's optimizer has its own."""
    own = isinstance(optimizer, optax.GradientTransformation)
    if own and (lr_scheduler is not None or config.scheduler is not None):
        raise ConfigError(
            "scheduler: the optimizer passed in has its own learning rate, so this schedule would do nothing; pass "
            "a function of the schedule instead (optimizer=lambda lr: optax.adamw(lr)), or drop the scheduler"
        )
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise ConfigError(f"lr_scheduler: {lr_scheduler!r} is not a function from a step count to a learning rate")
    callers = "the optimizer passed in" if own else "lr_scheduler" if lr_scheduler is not None else None
    total = _total(config, callers, total)
    if own:
        return None
    if lr_scheduler is not None:
        return lr_schedules.LRSchedule(lr_scheduler)
    return lr_schedules.from_config(config.scheduler, optimizers.base_lr(config.optimizer), total)


def _total(config: Config, callers: str | None, total: int | Total | None) -> Total | None:
    """Read `total_num_steps`; a number that the caller passed in must have an effect.

    Args:
      callers: what the caller passed in instead of the config's schedule.
    """
    if total is None or isinstance(total, Total):
        return total
    try:
        steps = INT32(total)
    except ValueError as wrong:
        raise ConfigError(f"total_num_steps = {total!r}: {wrong}") from None
    kind = config.scheduler.type if config.scheduler else None
    given = config.scheduler.params.get("total_num_steps") if config.scheduler and not callers else None
    if given is None:
        taker = callers or (f"scheduler.type {kind!r}" if kind else "a constant learning rate")
        raise ConfigError(f"total_num_steps = {steps} has no effect: {taker} takes none; leave it out")
    if not is_auto(given) and given != steps:
        raise ConfigError(
            f'total_num_steps = {steps}, and scheduler.params.total_num_steps = {given}: write "auto" in the config, '
            "or pass no other number"
        )
    return Total(steps, "passed in")
