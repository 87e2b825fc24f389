"""The functional API: one compiled step for every stage, precision and layout.

step = make_train_step(model, config)
state = step.init(jax.random.key(0))
state, metrics = step(state, batch)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero import optimizers, sharding
from jzero.batch import check_batch, place_batch, rows_of_this_process
from jzero.config import Config
from jzero.distributed import heartbeat
from jzero.distributed.consistency import Guard
from jzero.errors import ConfigError
from jzero.gradients import Gradients, Result
from jzero.loss_scale import LossScale
from jzero.mesh import PIPE, batch_spec, check_against, check_mesh, is_gpu, make_mesh, replicas
from jzero.model import ENDS, Model, StackModel, check_model
from jzero.optimizers import lr_schedules
from jzero.pipeline.stages import pipeline_gradients
from jzero.precision import Precision
from jzero.state import States, TrainState, check_alive
from jzero.tree import combine, named, partition

# Measured on 4 x H200 (experiments/benchmarks): cuBLAS instead of Triton matrix products +5 %, and larger combined
# collectives under the scheduler that overlaps them +2 %.
GPU_COMPILER_OPTIONS: dict[str, bool | int | float | str] = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * 2**20,
}

Metrics = dict[str, jax.Array]


class Details(NamedTuple):
    """What a step tells besides its metrics: the loss of every micro-batch [accum], the loss scale after the step."""

    micro_losses: jax.Array
    loss_scale: LossScale


def make_train_step(
    model: Model,
    config: Config | dict | str,
    *,
    mesh: Mesh | None = None,
    optimizer: optax.GradientTransformation | Callable[[optax.Schedule], optax.GradientTransformation] | None = None,
) -> TrainStep:
    """Compile-ready train step of `model` under `config`.

    Args:
      model: `init(rng)` and `loss(params, batch, rng)`, see `jzero.model`; Flax modules by `jzero.from_flax`.
      config: a `Config`, or whatever `Config.load` takes.
      mesh: default `make_mesh(config)`.
      optimizer: instead of the config's: an optax transformation, or a function of the config's learning-rate
        schedule that makes one.

    Raises:
      ConfigError: a config that does not fit itself, the devices or the model, before anything is compiled.
    """
    return TrainStep(model, Config.load(config), mesh=mesh, optimizer=optimizer)


class TrainStep:
    """A train step bound to a mesh. Call it, or `lower` it for a machine that is not there.

    Attributes:
      mesh, config: as given or resolved.
      batch_sizes: global batch, micro-batch per replica, accumulation.
      leaves: the tree of `zero.Leaf`s, where every parameter lies.
      state_shardings: the `TrainState`'s NamedShardings, for checkpoints. batch_sharding: every batch leaf's.
      state_shapes: the `TrainState`'s shapes.

    `former`: the batch of a run that goes on, see `Config.batch`.
    """

    def __init__(
        self, model: Model, config: Config, *, mesh: Mesh | None = None, optimizer: Any = None,
        lr_scheduler: optax.Schedule | None = None, former: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        check_model(model)
        self.model, self.config = model, (config := _with_stages(config, model, mesh))
        self.mesh = make_mesh(config) if mesh is None else mesh
        check_mesh(self.mesh)
        self.replicas = replicas(self.mesh)
        check_against(config, self.mesh)
        self.batch_sizes = config.batch(self.replicas, former)
        self.precision = Precision.from_config(config)
        abstract = jax.eval_shape(model.init, jax.random.key(0))
        self.leaves = sharding.layout(
            abstract,
            stage=config.zero_optimization.stage,
            mesh=self.mesh,
            persistence_threshold=config.zero_optimization.stage3_param_persistence_threshold,
            has_stack=isinstance(model, StackModel),
            chunks=config.pipeline.chunks,
            frozen=config.frozen_parameters,
            vocabulary=self._vocabulary(abstract),
            gather_once=config.pipeline.gather == "step",
        )
        trainable = [leaf for leaf in jax.tree.leaves(self.leaves) if leaf.trainable]
        if not trainable and config.frozen_parameters:
            raise ConfigError(
                f"frozen_parameters = {list(config.frozen_parameters)}: every parameter is frozen; leave one to train"
            )
        if not trainable:
            raise ConfigError(f"{model!r} has no parameters to train: init(rng) returned no floating-point arrays")
        self.trainable_names = [leaf.name for leaf in trainable]
        self.own_optimizer = optimizer is not None
        self.schedule = self._choose_schedule(optimizer, lr_scheduler)
        stacked, _ = partition(self.leaves, jax.tree.map(lambda leaf: leaf.stacked, self.leaves))
        tx = optimizers.resolve(
            optimizer, config.optimizer, self.schedule, stacked=stacked, state_dtype=self.precision.optimizer_state
        )
        self.tx = optax.with_extra_args_support(tx)  # reduce_on_plateau wants the loss
        make_gradients = pipeline_gradients if self.mesh.shape[PIPE] > 1 else Gradients
        self.gradients: Gradients = make_gradients(
            model, config, self.mesh, self.leaves, self.precision, self.batch_sizes.micro
        )
        self._guard = Guard(self.mesh, config, self.leaves)
        jit = _jit(config, self.mesh)
        self._states = states = States(model, self.tx, self.leaves, self.mesh, self.precision, jit)
        self.state_shapes, self.state_specs, self.state_shardings = states.shapes, states.specs, states.shardings
        self.batch_sharding = NamedSharding(self.mesh, batch_spec(self.mesh))
        self._compile(jit)

    def __repr__(self) -> str:
        degrees = " x ".join(f"{axis} {n}" for axis, n in self.mesh.shape.items() if n > 1) or "1 device"
        b = self.batch_sizes
        return (
            f"TrainStep({self.model!r}, ZeRO-{self.config.zero_optimization.stage}, {self.config.precision}, "
            f"mesh {degrees}, batch {b.train} = {b.micro} x {b.accum} x {self.replicas})"
        )

    def _vocabulary(self, params: Any) -> dict[str, int]:
        """name -> dimension of the leaves of the ends whose vocabulary the pipeline divides: all of them or none."""
        stages = self.mesh.shape[PIPE]
        known = named(params)
        wanted = {f"{ENDS}/{name}": dim for name, dim in getattr(self.model, "vocabulary", {}).items()}
        if unknown := sorted(wanted.keys() - known.keys()):
            raise ConfigError(f"{self.model!r}: vocabulary names {unknown}, no parameters; they are {', '.join(known)}")
        return wanted if all(known[name].shape[dim] % stages == 0 for name, dim in wanted.items()) else {}

    def _choose_schedule(self, optimizer: Any, lr_scheduler: Any) -> lr_schedules.Schedule | None:
        """The learning rate as a function of the steps applied; None if a client's optimizer keeps it to itself."""
        own = isinstance(optimizer, optax.GradientTransformation)
        if own and (lr_scheduler is not None or self.config.scheduler is not None):
            raise ConfigError(
                "scheduler: the optimizer passed in has its own learning rate, so this schedule would do nothing; pass "
                "a function of the schedule instead (optimizer=lambda lr: optax.adamw(lr)), or drop the scheduler"
            )
        if own:
            return None
        if lr_scheduler is not None and not callable(lr_scheduler):
            raise ConfigError(f"lr_scheduler: {lr_scheduler!r} is not a function from a step count to a learning rate")
        if lr_scheduler is not None:
            return lr_schedules.Schedule(lr_scheduler)
        return lr_schedules.from_config(self.config.scheduler, optimizers.base_lr(self.config.optimizer))

    # ------------------------------------------------------------------ state

    def init(self, rng: jax.Array, params: Any = None) -> TrainState:
        """A new state, born sharded: no device ever holds more than its part.

        Args:
          rng: as from `jax.random.key(0)`.
          params: instead of the model's `init(rng)`; laid out by `state_shardings.params` they are taken as they are.

        Raises:
          ConfigError: an rng that is no key, params of another model.
        """
        return self._states.init(rng, params)

    def new_loss_scale(self, skipped: jax.Array) -> LossScale:
        """A loss scale as at the start, after so many skipped steps: for a state of another precision."""
        return self._states.new_loss_scale(skipped)

    # ------------------------------------------------------------------ programs

    def _compile(self, jit: Callable) -> None:
        state, batch = self.state_shardings, self.batch_sharding
        replicated = NamedSharding(self.mesh, PartitionSpec())
        self._step = jit(
            self._update, in_shardings=(state, batch), out_shardings=(state, replicated, replicated), donate_argnums=0
        )
        self._evaluate = jit(self._map(self.gradients.evaluate, 0, PartitionSpec()))
        self._micro_loss = jit(self._map(self.gradients.micro_loss, 2, PartitionSpec()))
        spec = batch_spec(self.mesh)
        self._concatenate = jit(
            jax.shard_map(
                lambda parts: jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts),
                mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False,
            )
        )  # fmt: skip

    def _map(self, f: Callable, n_rest: int, out_specs: Any) -> Callable:
        """`f(params, batch, *rest)` over the mesh, manual on every axis; `rest` is replicated."""
        specs = (self.state_specs.params, batch_spec(self.mesh), *[PartitionSpec()] * n_rest)
        return jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    def _update(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics, Details]:
        grad_specs, _ = partition(self.leaves, self.state_specs.params)
        replicated: Any = PartitionSpec()
        gradients = self._map(self.gradients, 2, Result(grad_specs, replicated, replicated, replicated))
        scale = state.loss_scale.scale
        rng = jax.random.fold_in(state.rng, state.step)
        grads, unit, loss, micro_losses = gradients(state.params, batch, rng, scale)

        # From here on arrays are global: norms, trust ratios and factored moments are right whatever the layout.
        squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(squares.sum()) / unit
        clip = self.config.gradient_clipping
        factor = jnp.where(norm > clip, clip / norm, 1.0) / unit if clip else 1 / unit
        grads = jax.tree.map(lambda g: g * factor, grads)
        old, frozen = partition(self.leaves, state.params)
        updates, opt_state = self.tx.update(grads, state.opt_state, old, value=loss)
        finite = (jnp.isfinite(squares) & jnp.isfinite(unit)) | (not self.precision.check_overflow)
        params, opt_state = jax.tree.map(
            partial(jnp.where, finite.all()), (optax.apply_updates(old, updates), opt_state), (old, state.opt_state)
        )
        lr = self.lr(state)
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=combine(self.leaves, params, frozen),
            opt_state=opt_state,
            loss_scale=self.precision.scaler.update(state.loss_scale, finite),
        )
        metrics = {"loss": loss, "grad_norm": norm, "lr": lr, "loss_scale": scale, "skipped": ~finite.all()}
        return state, metrics, Details(micro_losses, state.loss_scale)

    def lr(self, state: TrainState) -> jax.Array:
        """The learning rate of the next step; NaN if a client's optimizer keeps it to itself."""
        if self.schedule is None:
            return optimizers.lr_of(state.opt_state)
        return jnp.float32(self.schedule.lr(state.step - state.loss_scale.skipped))

    # ------------------------------------------------------------------ calls

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One optimizer step on one global batch; `state` is donated.

        Args:
          batch: a pytree whose leaves have the leading dimension `batch_sizes.train`; NumPy or JAX arrays.

        Returns:
          The new state, and metrics: loss (mean over the global batch), grad_norm (global, before clipping),
          lr, loss_scale, skipped (a gradient was not finite, and nothing changed).

        Raises:
          ConfigError: a batch of another size.
        """
        state, metrics, _ = self.run(state, batch)
        return state, metrics

    def run(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics, Details]:
        """As calling the step, with its details."""
        self._check_batch(batch, self.batch_sizes.train)
        check_alive(state)
        batch = self.place(batch)
        self._guard.check("a step", batch)
        return self._run(state, batch)

    def run_micro_batches(self, state: TrainState, parts: Sequence[Any]) -> tuple[TrainState, Metrics, Details]:
        """As `run`, on micro-batches of all replicas (leading dimension micro x replicas), however many."""
        parts = [self.place_micro_batch(part) for part in parts]
        check_alive(state)
        self._guard.check("a step", parts[0], len(parts))
        return self._run(state, self._concatenate(parts))

    def _run(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics, Details]:
        heartbeat.begin()
        done = self._step(state, batch)
        heartbeat.finished_when(done[1]["loss"])
        return done

    def join(self, parts: Sequence[Any]) -> Any:
        """Micro-batches of all replicas as one batch on the devices, its rows in another order."""
        return self._concatenate([self.place_micro_batch(part) for part in parts])

    def evaluate(self, state: TrainState, batch: Any) -> jax.Array:
        """The loss, without dropout or update, of a global batch whose rows are any multiple of micro x replicas."""
        self._check_batch(batch, self.micro_size, multiples=True)
        check_alive(state)
        batch = place_batch(batch, self.batch_sharding, len(jax.tree.leaves(batch)[0]))
        self._guard.check("evaluation", batch)
        heartbeat.begin()
        loss = self._evaluate(state.params, batch)
        heartbeat.finished_when(loss)
        return loss

    def micro_loss(self, state: TrainState, part: Any, index: int) -> jax.Array:
        """The loss of micro-batch `index` of the next step, before that step: the same dropout, no gradient."""
        check_alive(state)
        rng = jax.random.fold_in(state.rng, state.step)
        part = self.place_micro_batch(part)
        self._guard.check("a micro-batch's loss", part)
        return self._micro_loss(state.params, part, rng, jnp.int32(index))

    def lower(self, batch_shapes: Any) -> jax.stages.Lowered:
        """The step lowered for the mesh's devices, which need not exist; the batch as ShapeDtypeStructs or arrays."""
        self._check_batch(batch_shapes, self.batch_sizes.train)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_shapes)
        return self._step.lower(self.state_shapes, shapes)

    # ------------------------------------------------------------------ batches

    @property
    def micro_size(self) -> int:
        """Rows of a micro-batch over all replicas."""
        return self.batch_sizes.micro * self.replicas

    def place(self, batch: Any) -> Any:
        """A global batch laid out over (`data`, `zero`); of many processes each gives all of it or its own rows."""
        return place_batch(batch, self.batch_sharding, self.batch_sizes.train)

    def place_micro_batch(self, part: Any) -> Any:
        """A micro-batch of all replicas, the same way."""
        self._check_batch(part, self.micro_size)
        return place_batch(part, self.batch_sharding, self.micro_size)

    def _check_batch(self, batch: Any, rows: int, multiples: bool = False) -> None:
        b = self.batch_sizes
        why = f"train_batch_size {b.train} = micro-batch {b.micro} x accumulation {b.accum} x {self.replicas} replicas"
        here = rows if jax.process_count() == 1 else len(rows_of_this_process(self.batch_sharding, rows))
        check_batch(batch, rows, here, why, multiples)


def _with_stages(config: Config, model: Model, mesh: Mesh | None) -> Config:
    """The config with the number of stages that a `PipelineModule` was made for."""
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


def _jit(config: Config, mesh: Mesh) -> Callable:
    """`jax.jit` with the compiler options of the devices and the config."""
    options = {**(GPU_COMPILER_OPTIONS if is_gpu(mesh) else {}), **config.compiler_options}
    jit = partial(jax.jit, compiler_options=options or None)
    if config.compiler_options:  # a wrong name is best found now, on the smallest program
        try:
            jit(lambda: 0.0, out_shardings=NamedSharding(mesh, PartitionSpec())).lower().compile()
        except Exception as error:
            raise ConfigError(f"compiler_options = {config.compiler_options}: XLA says {error}") from None
    return jit
