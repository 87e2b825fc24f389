"""A config resolved for a model and devices: everything that is decided before a program is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero._compat import allow_float16_products_on_cpu
from jzero.config import Config
from jzero.config.sizes import BatchSizes
from jzero.errors import ConfigError, both
from jzero.layout import offload, pinned_memory, sharding, zeropp
from jzero.layout.zero import Rule, stage_rule
from jzero.mesh import EXPERT, PIPE, TENSOR, batch_spec, check_against, check_mesh, is_gpu, make_mesh, replicas
from jzero.model import ENDS, Model, ModelFacts, check_model
from jzero.passes.gradients import DeviceFunctions
from jzero.passes.sequential import Passes, sequential
from jzero.pipeline.stages import pipelined
from jzero.precision import Precision, cast, settle_precision
from jzero.spread.dimension_search import with_found_dimensions
from jzero.spread.division import check_tables, divisions_by_axis
from jzero.spread.layer_specs import with_layer_specs
from jzero.step.optimizer import StepOptimizer, resolve_optimizer, resolve_schedule
from jzero.tracing.fp8_weights import Noted, large_weights
from jzero.tree import PyTree, named
from jzero.values.parameters import Total

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
class Setup:
    """A config resolved for one model on one mesh.

    Attributes:
      batch_sizes: global batch, micro-batch per replica, accumulation.
      plus: the parts of ZeRO++ that the config turns on.
      layouts: the tree of `ParamLayout`s.
      weights: shapes of the parameters, in the compute dtype.
      optimizer: the transformation of gradients, its schedule and groups.
      passes: how the forward and backward passes run.
      searched: whether the config's `tensor_parallel.dimensions` was found by trying.
      unfit: parameter -> the dimension of the model's table that `tensor` does not divide, see `spread.division`.
      fp8: which weights are multiplied in fp8, known once a step is traced.
    """

    model: Model
    config: Config
    mesh: Mesh
    batch_sizes: BatchSizes
    precision: Precision
    plus: zeropp.Plus
    layouts: PyTree
    weights: PyTree
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

    def region(self, model: Model | None = None, passes: Passes | None = None) -> DeviceFunctions:
        """Make the manual region of the model; or of another one with the same parameters, with its passes."""
        return DeviceFunctions(
            model or self.model, self.layouts, self.weights, passes or self.passes, self.config, self.mesh,
            self.precision, self.rows, self.fp8,
        )  # fmt: skip

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
    pinned_memory.allow(config)  # before JAX starts the devices

    config = with_stages(config, model, mesh)
    mesh = make_mesh(config) if mesh is None else mesh
    check_mesh(mesh)
    check_against(config, mesh)

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
    _check_fp8(config, precision, mesh)

    def laid_out() -> tuple[zeropp.Plus, Mapping[str, int | None], PyTree, Passes]:
        offload.check_offload(config.zero_optimization, mesh)
        plus = zeropp.read_plus(config.zero_optimization, mesh)
        division = divisions_by_axis(model, facts.shapes, config, mesh, facts.has_stack, searched)
        layouts = _layouts(facts, config, mesh, plus, {axis: of.dims for axis, of in division.items()})
        return plus, division[TENSOR].unfit, layouts, make_passes(model, config, mesh, layouts, precision)

    # Both sets of problems are reported at once.
    batch_sizes, (plus, unfit, layouts, passes) = both(lambda: config.batch(replicas(mesh), former), laid_out)
    if passes.facts.pipeline:
        passes.facts.pipeline(batch_sizes.accum)  # raises for a number of micro-batches that the schedule cannot run
    # After the layouts, which say what is state and keeps its dtype.
    weights = jax.eval_shape(partial(_cast_weights, layouts, precision), facts.shapes)

    total = total_num_steps(batch_sizes.train) if callable(total_num_steps) else total_num_steps
    schedule = resolve_schedule(config, optimizer, lr_scheduler, total)
    step_optimizer = resolve_optimizer(facts, config, mesh, layouts, precision, optimizer, schedule)
    _check_compiler_options(config, mesh)  # last: it compiles
    return Setup(
        model, config, mesh, batch_sizes, precision, plus, layouts, weights, step_optimizer, passes, searched, unfit
    )


def float16_on_cpu(precision: Precision, mesh: Mesh) -> bool:
    """Return whether a model computes in float16 on simulated devices."""
    return precision.compute == jnp.float16 and mesh.devices.flat[0].platform == "cpu"


def _check_fp8(config: Config, precision: Precision, mesh: Mesh) -> None:
    if not config.fp8.enabled:
        return
    if precision.compute != jnp.bfloat16:
        raise ConfigError(
            f'fp8.enabled = true in {config.precision}: what is not multiplied in fp8 needs bfloat16; set "bf16": '
            '{"enabled": true}'
        )
    device = mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))
    if is_gpu(mesh) and capability.replace(".", "").isdigit() and float(capability) < 8.9:
        raise ConfigError(
            f"fp8.enabled = true on {device.device_kind} (compute capability {capability}): fp8 products need 8.9 or "
            "higher (Ada, Hopper, Blackwell); turn fp8 off"
        )


def _cast_weights(layouts: PyTree, precision: Precision, params: PyTree) -> PyTree:
    return jax.tree.map(lambda layout, x: x if layout.state else cast(x, precision.compute), layouts, params)


def make_passes(
    model: Model, config: Config, mesh: Mesh, layouts: PyTree, precision: Precision, read: Callable | None = None
) -> Passes:
    """Make the passes of the mesh: through the stages of a pipeline, or in sequence."""
    make = pipelined if mesh.shape[PIPE] > 1 else sequential
    return make(model, config, mesh, layouts, precision, read)


def with_stages(config: Config, model: Model, mesh: Mesh | None) -> Config:
    """Set the config's number of stages to the one that a `PipelineModule` was made for."""
    stages = getattr(model, "num_stages", None)
    if stages is None:
        return config
    key = "pipeline.stages" if config.pipeline.stages else "mesh.pipe"
    asked = config.pipeline.stages or (config.mesh.pipe if "pipe" in config.mesh.model_fields_set else -1)
    if mesh is not None:
        check_mesh(mesh)
        key, asked = "the mesh passed in: pipe", mesh.shape[PIPE]
    if asked not in (stages, -1):
        raise ConfigError(f"{key} = {asked}, but {model!r} has num_stages = {stages}: leave one of them out")
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"stages": stages})})


def _check_compiler_options(config: Config, mesh: Mesh) -> None:
    """Raise a ConfigError for options that XLA refuses: on the smallest program, before a large one is traced."""
    if not config.compiler_options:
        return
    try:
        jit = partial(jax.jit, compiler_options=config.compiler_options)
        jit(lambda: 0.0, out_shardings=NamedSharding(mesh, PartitionSpec())).lower().compile()
    except Exception as error:
        raise ConfigError(f"compiler_options = {config.compiler_options}: XLA refuses them: {error}") from None


def _layouts(
    facts: ModelFacts, config: Config, mesh: Mesh, plus: zeropp.Plus, dims: dict[str, dict[str, int]]
) -> PyTree:
    layouts = sharding.param_layouts(facts, config, mesh, plus, _vocabulary(facts, mesh.shape[PIPE]), dims)
    if not any(layout.trainable for layout in jax.tree.leaves(layouts)):
        given = {
            "trainable_parameters": config.trainable_parameters,
            "frozen_parameters": config.frozen_parameters or None,
        }
        if keys := [f"{key} = {list(patterns)}" for key, patterns in given.items() if patterns is not None]:
            raise ConfigError(f"{', '.join(keys)}: every parameter is frozen; leave one to train")
        raise ConfigError(f"{facts.model!r} has no parameters to train: init(rng) returned no floating-point arrays")
    return offload.choose_host_state(layouts, config.zero_optimization)


def _vocabulary(facts: ModelFacts, stages: int) -> dict[str, int]:
    """Map the names of the parameters whose vocabulary the pipeline divides to that dimension: all of them or none."""
    known = named(facts.shapes)
    wanted = {f"{ENDS}/{name}": dim for name, dim in getattr(facts.model, "vocabulary", {}).items()}
    if unknown := sorted(wanted.keys() - known.keys()):
        raise ConfigError(
            f"{facts.model!r}: vocabulary names {unknown}, which are not parameters; the names are {', '.join(known)}"
        )
    return wanted if all(known[name].shape[dim] % stages == 0 for name, dim in wanted.items()) else {}
