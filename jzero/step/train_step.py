"""The functional API: one compiled step for every stage, precision and layout.

step = make_train_step(model, config)
state = step.init(jax.random.key(0))
state, metrics = step(state, batch)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jzero.config import Config, without_curriculum
from jzero.config.sizes import BatchSizes
from jzero.display.slow_work import slow_work
from jzero.distributed import compilation_cache
from jzero.distributed.host_collectives import Guard, check_same
from jzero.errors import ConfigError
from jzero.layout.sharding import trainable
from jzero.loss import LOSS
from jzero.loss_scale import LossScale
from jzero.mesh import batch_spec, replicas
from jzero.model import Model
from jzero.pictures import html
from jzero.pipeline.module import PipelineModule
from jzero.step.batch import Amount, BatchPlacer, amount_of, check_batch, check_first_batch, place_extra
from jzero.step.call import Call
from jzero.step.evaluate import EvalStep
from jzero.step.generate import Generator
from jzero.step.programs import (
    FirstCall,
    StepInput,
    StepResult,
    evaluate_program,
    gradients_program,
    micro_loss_program,
    step_program,
)
from jzero.step.setup import Setup, resolve
from jzero.step.state import States, TrainState, check_alive
from jzero.step.update import NEVER, Metrics, SkipWhen, learning_rate, why_no_rate, with_aside
from jzero.tree import PyTree, combine, partition


def make_train_step(
    model: Model,
    config: Config | dict | str,
    *,
    mesh: Mesh | None = None,
    optimizer: optax.GradientTransformation | Callable[[optax.Schedule], optax.GradientTransformation] | None = None,
    total_num_steps: int | None = None,
) -> TrainStep:
    """Make the train step of `model` under `config`; it compiles at its first call.

    Args:
      model: `init(rng)` and `loss(params, batch, rng)`, see `jzero.model`; Flax modules by `jzero.from_flax`.
      config: a `Config`, or anything `Config.load` takes.
      mesh: default `make_mesh(config)`.
      optimizer: instead of the config's: an optax transformation, or a function of the config's learning-rate
        schedule that makes one.
      total_num_steps: the optimizer steps of the run, where the config's schedule has "auto"; another number than the
        config's is an error, and so is one that no schedule takes.

    Raises:
      ConfigError: a config that does not fit itself, the devices or the model, before anything is compiled.
    """
    config = without_curriculum(Config.load(config))
    return TrainStep(resolve(model, config, mesh=mesh, optimizer=optimizer, total_num_steps=total_num_steps))


class TrainStep:
    """A train step bound to a mesh. Call it, or `lower` it for devices you do not have.

    Attributes:
      setup: the resolved config, see `Setup`; its model, mesh, config, batch_sizes, precision and layouts are here too.
      state_shapes, state_specs, state_shardings: of the `TrainState`; the shardings are for checkpoints.
      host_bytes: bytes of host memory per device.
      batch_sharding: of every leaf of a batch.
      amount: the samples and tokens of the last step's batch.
      first: the shapes of its first call, and the trace for other batches; None before `prepare`.
      generate: continues prompts: `step.generate(state, tokens, max_new_tokens)`, see `step.generate.Generator`.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.model, self.config, self.mesh = setup.model, setup.config, setup.mesh
        self.batch_sizes, self.precision, self.layouts = setup.batch_sizes, setup.precision, setup.layouts
        self.replicas = replicas(self.mesh)
        self.rate: float | None = None  # by set_lr
        # A profile reads the program of its step, which differs from the first under a curriculum.
        self._is_profiled = any(
            (self.config.wall_clock_breakdown, self.config.flops_profiler.enabled, self.config.comms_logger.enabled)
        )
        self.amount = Amount()
        self._guard = Guard(self.mesh, self.config, self.layouts)
        self._states = states = States(setup)
        self.state_shapes, self.state_specs, self.state_shardings = states.shapes, states.specs, states.shardings
        self.host_bytes = states.host_bytes
        self.batch_sharding = NamedSharding(self.mesh, batch_spec(self.mesh))
        self._placer = BatchPlacer(self.batch_sharding)
        compilation_cache.turn_on(self.mesh.devices.flat)
        self._make_programs()
        self.generate = Generator(setup, self._guard)

    def _make_programs(self) -> None:
        """Make the programs, which have the rows of a micro-batch; each compiles at its first call."""
        setup, states, guard = self.setup, self._states, self._guard
        self.first: FirstCall | None = None
        self._amounts: dict[Any, Amount] = {}  # of the batches that ran, by their shapes
        self._step = Call("the step", step_program(setup, states), guard, lambda done: done[1][LOSS], steady=True)
        self._gradients = Call("the gradients", gradients_program(setup, states), guard, lambda found: found[1][LOSS])
        self._evaluate = Call("the evaluation", evaluate_program(setup), guard, lambda means: means[LOSS])
        self._micro_loss = Call("a micro-batch's loss", micro_loss_program(setup, states), guard)

    def __repr__(self) -> str:
        degrees = " x ".join(f"{axis} {n}" for axis, n in self.mesh.shape.items() if n > 1) or "1 device"
        b = self.batch_sizes
        return (
            f"TrainStep({self.model!r}, ZeRO-{self.config.zero_optimization.stage}, {self.config.precision_text}, "
            f"mesh {degrees}, batch {b.train} = {b.micro} x {b.accum} x {self.replicas})"
        )

    _repr_html_ = html.train_step

    @property
    def trainable_names(self) -> list[str]:
        """The names of the trained parameters in checkpoints, in the order of `LossScale.culprits`."""
        return [name for name, _ in self.setup.gradient_names]

    # ------------------------------------------------------------------ state

    def init(self, rng: jax.Array, params: PyTree = None, *, donate: bool = False) -> TrainState:
        """Make a new state, sharded from the start: no device ever holds more than its part.

        Args:
          rng: as from `jax.random.key(0)`.
          params: instead of the model's `init(rng)`, in any layout and dtype: a pytree like `init`'s, an nnx.Module or
            nnx.State, or Linen variables, which are copied; or the path of an Orbax checkpoint that contains one of
            them, written by `StandardCheckpointer`, `PyTreeCheckpointer` or a `CheckpointManager` (items `params` and
            `default`); every device reads its part. None in the place of a parameter stands for the model's own.
          donate: give `params` up instead: arrays already sharded by `state_shardings.params` are not copied, and the
            first step deletes them.

        Raises:
          ConfigError: an rng that is not a key, params of another model, a path without an Orbax checkpoint.
          CheckpointError: the Orbax checkpoint is damaged.
        """
        with slow_work("initialising the state"):
            return self._states.init(rng, params, donate)

    def new_loss_scale(self, skipped: jax.Array) -> LossScale:
        """Make a fresh loss scale with `skipped` already counted, to restore a state of another precision."""
        return self._states.new_loss_scale(skipped)

    def lr(self, state: TrainState) -> jax.Array:
        """Look up the learning rate of the next step; NaN if the caller's optimizer does not expose it."""
        return learning_rate(self.setup, state) if self.rate is None else jnp.float32(self.rate)

    def set_lr(self, lr: float) -> None:
        """Run the next steps at another learning rate; groups keep their ratios to it. All processes call it.

        The first call compiles the step once more; later ones only pass another number.

        Raises:
          ConfigError: a schedule or the caller's optimizer decides the rate, or the optimizer's updates are not
            proportional to it.
        """
        if problem := why_no_rate(self.setup, lr):
            raise ConfigError(f"set_lr({lr!r}): {problem}")
        check_same("set_lr", {"lr": float(lr)})
        self.rate = float(lr)

    def resume_lr(self, lr: float | None) -> None:
        """Run the next steps at the rate that a checkpoint's run had set; None: at the schedule's."""
        self.rate = lr

    def set_train_batch_size(self, size: int) -> None:
        """Change the global batch by changing the accumulation; the next step compiles for it."""
        unit = self.micro_size
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1 or size % unit:
            wanted = f"must be a multiple of {unit} (micro-batch x replicas), as an integer"
            raise ConfigError(f"train_batch_size = {size!r}: {wanted}")
        self.batch_sizes = self.batch_sizes._replace(train=int(size), accum=int(size) // unit, inferred="")

    def resume_batch(self, sizes: BatchSizes) -> None:
        """Run the next steps with the batch sizes of a checkpoint's run; an "auto" micro-batch may be another one."""
        if sizes.micro != self.batch_sizes.micro:
            self.setup = dataclasses.replace(self.setup, batch_sizes=sizes)
            self._make_programs()
        self.batch_sizes = sizes

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with the moving average of the parameters in their place, to evaluate or export it.

        The arrays are those of `state`: do not train the result.

        Raises:
          ConfigError: the config has no section `ema`.
        """
        if not self.config.ema:
            raise ConfigError('ema: the config keeps no moving average; add "ema": {"decay": 0.999}')
        check_alive(state)
        _, rest = partition(state.params, trainable(self.layouts))
        return dataclasses.replace(state, params=combine(state.opt_state.ema, rest))

    # ------------------------------------------------------------------ programs

    def trace(self, batch_shapes: PyTree, extra: PyTree = None) -> jax.stages.Traced:
        """Trace the step on a global batch and what goes besides it, as ShapeDtypeStructs or as they are."""
        check_batch(batch_shapes, self.batch_sizes.train, self.batch_sharding, self._why_rows)
        shapes = jax.eval_shape(lambda *x: x, batch_shapes, extra)
        return self._step.program.trace(self.state_shapes, (shapes[0],), shapes[1], None, NEVER, None)

    @property
    def traced(self) -> jax.stages.Traced | None:
        """The trace of the first step that ran or was prepared; None before it."""
        return None if self.first is None else self.first.traced()

    def lower(self, batch_shapes: PyTree, extra: PyTree = None) -> jax.stages.Lowered:
        """Lower the step for the mesh's devices, which you need not have; the arguments are those of `trace`."""
        return self.trace(batch_shapes, extra).lower()

    # ------------------------------------------------------------------ calls

    def __call__(self, state: TrainState, batch: PyTree, extra: PyTree = None) -> tuple[TrainState, Metrics]:
        """Run one optimizer step on one global batch; `state` is donated.

        Args:
          batch: a pytree whose leaves have the leading dimension `batch_sizes.train`; NumPy or JAX arrays, or
            PyTorch's tensors on the host. Each device has a block of rows, and micro-batch k is the k-th part of every
            block: means over rows do not depend on the mesh, but BatchNorm's statistics of a micro-batch do.
          extra: any pytree of arrays and numbers that the loss takes besides the batch: a teacher's parameters, a
            scalar that changes with the step. It reaches the loss whole on every device.

        Returns:
          The new state, and metrics: loss (mean over the global batch), grad_norm (global, before clipping),
          lr, loss_scale, skipped (a gradient was not finite, and nothing changed); and the model's own by name.

        Raises:
          ConfigError: a batch of another size, an `extra` on other devices.
        """
        state, metrics, _ = self.run(state, self.prepare([batch], extra))
        return state, metrics

    def prepare(
        self, parts: Sequence[PyTree], extra: PyTree = None, skip: SkipWhen = NEVER, *, rows: int | None = None,
        factor: float = 1.0,
    ) -> StepInput:  # fmt: skip
        """Check the input of a step, and put it onto the devices. Before the first step, `traced` is its trace then.

        Args:
          parts: the global batch alone, or any number of micro-batches of all replicas.
          skip: as for `run`.
          rows: of each part; default: those of a global batch.
          factor: multiplies the gradient, which is that of the mean over the micro-batches.
        """
        rows = self.batch_sizes.train if rows is None else rows
        batch = self._place(parts, rows, keep_small=skip.frozen is None)  # a search reads what it ran on
        # None for 1: the program of an ordinary step has no such product.
        fed = StepInput(batch, place_extra(extra, self.mesh), None if factor == 1 else np.float32(factor))
        if not self._amounts:
            self._guard.check(self._step.name, fed.batch, fed.extra)
            check_first_batch(self.model, batch)
        if not self._amounts or self._is_profiled:
            self.first = FirstCall(self._step.program, self._states, fed, self._rate, skip)
        return fed

    def run(self, state: TrainState, fed: StepInput, skip: SkipWhen = NEVER) -> StepResult:
        """Run one step on what `prepare` returned, and return its details too.

        Args:
          skip: when nothing changes; with `frozen` the details have what the step ran on.
        """
        check_alive(state)
        shapes = tuple(map(np.shape, jax.tree.leaves(fed.batch)))
        if shapes not in self._amounts:
            self._amounts[shapes] = amount_of(fed.batch[0]).times(len(fed.batch))
        self.amount = self._amounts[shapes]
        state, metrics, details = self._step(state, fed.batch, fed.extra, self._rate, skip, fed.factor)
        return state, metrics, details if skip.frozen is None else details._replace(fed=fed)

    @property
    def has_varied(self) -> bool:
        """True if steps ran on batches of several shapes."""
        return len(self._amounts) > 1

    @property
    def _rate(self) -> np.float32 | None:
        return None if self.rate is None else np.float32(self.rate)

    def gradients(self, state: TrainState, batch: PyTree, extra: PyTree = None, *, new_state: bool = False) -> Any:
        """Compute the gradients of the next step without taking it: for SAM, own update rules, influence functions.

        Args:
          state: is not donated; its dropout and loss scale are those that the step would use.
          batch, extra: as for a step.
          new_state: return a third value, the state in which what is not trained (BatchNorm's statistics, histories of
            fp8) has moved on as in a step.

        Returns:
          The float32 gradients of the global batch's loss, before clipping, sharded like the master parameters at every
          stage (None for what is not trained), and metrics: loss, grad_norm, and the model's own.
        """
        batch, extra = self._place([batch], self.batch_sizes.train), place_extra(extra, self.mesh)
        check_alive(state)
        gradients, metrics, aside = self._gradients(state, batch, extra)
        return (gradients, metrics, with_aside(state, aside)) if new_state else (gradients, metrics)

    def evaluate(self, state: TrainState, batch: PyTree, extra: PyTree = None) -> Any:
        """Compute the loss of a batch without dropout or update.

        Args:
          batch: its rows are any multiple of micro x replicas.
          extra: as for a step.

        Returns:
          The loss; (loss, {name: metric}) of a model with `has_aux`.
        """
        return self.evaluate_parts(state, [batch], extra)

    def evaluate_parts(self, state: TrainState, parts: Sequence[PyTree], extra: PyTree = None) -> Any:
        """Compute the loss of micro-batches of all replicas as that of one batch, see `evaluate`."""
        batch = self._place(parts, self.micro_size, multiples=len(parts) == 1)
        check_alive(state)
        extra = place_extra(extra, self.mesh)
        means = self._evaluate(state.params, batch, extra)
        return (means.pop(LOSS), means) if getattr(self.model, "has_aux", False) else means[LOSS]

    def micro_loss(self, state: TrainState, part: PyTree, index: int, extra: PyTree = None) -> jax.Array:
        """Compute the loss of micro-batch `index` of the next step before that step, with its dropout.

        Every micro-batch starts from the state of `state`; in the step, each starts from that of the one before.
        """
        check_alive(state)
        rng = jax.random.fold_in(state.rng, state.step)
        parts, extra = self._place([part], self.micro_size), place_extra(extra, self.mesh)
        return self._micro_loss(state.params, parts, extra, rng, jnp.int32(index), state.fp8)

    def predict(self, state: TrainState, x: PyTree, *, numpy: bool = False, dropout: int | None = None) -> PyTree:
        """Compute the model's outputs for every row of x: `module(x)` without dropout, under the training layout.

        For a module with a layer stack x is a batch, and the outputs are `module.outputs(stack's output, x)`; for a
        `PipelineModule` x are the inputs. See `jzero.make_eval_step` for other functions.

        Args:
          x: any number of rows.
          numpy: return NumPy arrays with all rows, on every process.
          dropout: with the dropout of this micro-batch of the next step; x has its rows.
        """
        inputs = (x, None) if isinstance(self.model, PipelineModule) else x
        return self._predictions(state, inputs, numpy=numpy, dropout=dropout)

    @cached_property
    def _predictions(self) -> EvalStep:
        return EvalStep(self.setup, guard=self._guard)

    # ------------------------------------------------------------------ batches

    @property
    def _why_rows(self) -> str:
        b = self.batch_sizes
        return f"train_batch_size {b.train} = micro-batch {b.micro} x accumulation {b.accum} x {self.replicas} replicas"

    @property
    def micro_size(self) -> int:
        """Rows of a micro-batch over all replicas."""
        return self.batch_sizes.micro * self.replicas

    def place(self, batch: PyTree) -> PyTree:
        """Shard a global batch over (`data`, `zero`); each of several processes passes all of it or its own rows."""
        return self._place([batch], self.batch_sizes.train)[0]

    def place_micro_batch(self, part: PyTree) -> PyTree:
        """Shard a micro-batch of all replicas, the same way."""
        return self._place([part], self.micro_size)[0]

    def _place(self, parts: Sequence[PyTree], rows: int, **how: bool) -> tuple[PyTree, ...]:
        return self._placer.place(parts, rows, self._why_rows, **how)
