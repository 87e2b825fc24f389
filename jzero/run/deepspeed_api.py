"""An engine's methods by DeepSpeed's names, and errors for those of PyTorch's that it lacks."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
import optax

from jzero import weights
from jzero.adapters.torch_habits import refuses, refuses_of_engines, refuses_of_modules
from jzero.config import Config
from jzero.data.curriculum import METRIC, Curriculum
from jzero.distributed.place import get_local_rank, get_rank, get_world_size
from jzero.errors import ConfigError, refuse_keywords
from jzero.layout.offload import to_devices
from jzero.pictures import html
from jzero.run.deepspeed_names import KEYWORDS, deepspeed_names
from jzero.run.micro_batches import Accumulation
from jzero.run.observers import Observers
from jzero.run.run_report import report
from jzero.step.state import TrainState, check_alive
from jzero.step.train_step import Metrics, TrainStep


class ParamGroup(dict):
    """One group of parameters: their names (`params`), the next step's `lr`, and what the group sets."""

    def __setitem__(self, key: str, value: Any) -> None:
        instead = "engine.set_lr(...)" if key == "lr" else f"{key} in the config's optimizer.groups"
        raise ConfigError(f"param_groups[...][{key!r}] = {value!r}: param_groups are read-only; write {instead}")

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


@refuses(
    step="write engine.step()",
    state_dict="write engine.save_checkpoint(directory), or read engine.state.opt_state",
    load_state_dict="write engine.load_checkpoint(directory)",
    add_param_group="write optimizer.groups in the config",
    backward="write engine.backward(loss)",
)
class Optimizer(optax.GradientTransformationExtraArgs):
    """The optax transformation of an engine, with the attributes of a PyTorch optimizer that can be read."""

    engine: Callable[[], Any]

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups, in the config's order; last that of all other parameters."""
        engine = self.engine()
        groups, rates = engine.step_fn.setup.optimizer.groups, engine.get_lr()
        return [
            ParamGroup(params=list(group.leaves), lr=lr, **{k: v for k, v in group.values.items() if k != "lr_scale"})
            for group, lr in zip(groups, rates, strict=True)
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, since every step begins without gradients; see `Engine.zero_grad`."""
        self.engine().zero_grad()


@refuses(
    step="leave it out: engine.step() advances the schedule, if it updates the parameters",
    state_dict="write engine.save_checkpoint(directory); the step count is the schedule's only state",
    load_state_dict="write engine.load_checkpoint(directory)",
)
class LRScheduler:
    """The learning-rate schedule of an engine, with the attributes of a DeepSpeed scheduler that can be read."""

    def __init__(self, engine: Any):
        self._engine, self._schedule = _reference(engine), engine.step_fn.setup.optimizer.schedule

    def __call__(self, count: Any) -> Any:
        """Return the schedule's rate after `count` applied steps."""
        return self._schedule.lr(count)

    def get_lr(self) -> list[float]:
        """Return the next step's rate in each group."""
        return self._engine().get_lr()

    def get_last_lr(self) -> list[float]:
        """Return the last step's rate in each group; before the first step, the next one's."""
        return self._engine().get_last_lr()

    @property
    def last_batch_iteration(self) -> int:
        """The steps that were applied, which is the schedule's position."""
        engine = self._engine()
        return int(engine.live_state.step) - engine.skipped_steps


def _reference(engine: Any) -> Callable[[], Any]:
    """Refer to an engine without keeping its state in memory."""
    weak = weakref.ref(engine)

    def get() -> Any:
        if (engine := weak()) is None:
            raise ConfigError("the engine of this optimizer or lr_scheduler was deleted")
        return engine

    return get


@refuses_of_modules
class Module:
    """`engine.module`: call it for the Flax module."""

    def __init__(self, engine: DeepSpeedApi):
        self._engine = engine

    def __call__(self) -> Any:
        """Return the Flax module with the current parameters, in evaluation mode: `engine.module()(x)`."""
        model = self._engine.step_fn.model
        if not hasattr(model, "module"):
            raise ConfigError(f"{model!r} was not made by jzero.from_flax; its parameters: state.params")
        return model.module(to_devices(self._engine.live_state.params))


class _LossScale(float):
    """A number; DeepSpeed has a method of this name."""

    def __call__(self) -> float:
        raise ConfigError("engine.loss_scale(): write engine.loss_scale, without parentheses")


@deepspeed_names
@refuses_of_engines
class DeepSpeedApi:
    """The engine's getters, what its parameters predict, the files that it writes them to, and setters of the rate."""

    step_fn: TrainStep
    config: Config
    state: Any
    _metrics: Metrics | None
    _observers: Observers
    _accumulation: Accumulation
    _training: bool
    curriculum: Curriculum | None
    global_steps: int

    def _repr_html_(self) -> str:
        """Show the train step, the count of steps and the run report in a notebook."""
        line = f"<div><b>Engine</b>, global step {self.global_steps}</div>"
        return line + self.step_fn._repr_html_() + html.folded("run report", html.text(report(self.step_fn)))

    @property
    def live_state(self) -> TrainState:
        """The state; a ConfigError if a load has failed and left none."""
        check_alive(self.state)
        return self.state

    @property
    def module(self) -> Module:
        """The Flax module: `engine.module()` has the current parameters, in evaluation mode."""
        return Module(self)

    @property
    def optimizer(self) -> Optimizer:
        """The optax transformation in use, with `param_groups`."""
        tx = self.step_fn.setup.optimizer.tx
        view = Optimizer(tx.init, tx.update)
        view.engine = _reference(self)
        return view

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule; None if only the caller's optimizer has it."""
        return LRScheduler(self) if self.step_fn.setup.optimizer.schedule else None

    @property
    def device(self) -> str:
        """The place of batches: "cpu", the host. jzero puts them on the devices of the mesh."""
        return "cpu"

    def predict(self, x: Any, *, numpy: bool = False) -> Any:
        """Compute the model's outputs for every row of x; see `TrainStep.predict`."""
        return self.step_fn.predict(self.state, x, numpy=numpy)

    def generate(self, tokens: Any, max_new_tokens: int, **options: Any) -> Any:
        """Continue every row of tokens; the options are those of `jzero.step.generate.Generator`."""
        return self.step_fn.generate(self.state, tokens, max_new_tokens, **options)

    def save_16bit_model(
        self, save_dir: str | os.PathLike, save_filename: str = "model.safetensors", *, ema: bool = False,
        **deepspeed: Any,
    ) -> bool:  # fmt: skip
        """Write the parameters, or their moving average, in half precision to one safetensors file; see `weights.save`.

        The dtype is float16 if the config enables fp16, else bfloat16. Works at every stage; all processes call it.
        """
        refuse_keywords("save_16bit_model", deepspeed, KEYWORDS["save_16bit_model"])
        dtype = np.dtype(np.float16) if self.config.fp16.enabled else np.dtype(jnp.bfloat16)
        state = self.step_fn.averaged(self.live_state) if ema else self.live_state
        weights.save(state.params, self.step_fn, save_dir, save_filename, dtype)
        return True

    def save_adapters(self, save_dir: str | os.PathLike, *, ema: bool = False) -> None:
        """Write the adapters, or their moving average, in peft's format; all processes call it."""
        state = self.step_fn.averaged(self.live_state) if ema else self.live_state
        weights.save_adapters(state.params, self.step_fn, save_dir)

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode: `engine(micro_batch)` takes part in the next step."""
        self._training = mode
        return self

    def eval(self) -> Self:
        """Switch to evaluation mode: `engine(micro_batch)` only computes the loss, without dropout."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Do nothing: every step begins without gradients. An error while micro-batches wait for `step()`."""
        self._accumulation.check_empty("zero_grad")

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters.

        It does at every gradient_accumulation_steps()-th call, when that number of micro-batches waits (after
        `no_sync`), or as `set_gradient_accumulation_boundary` decides.
        """
        return self._accumulation.is_boundary(self.gradient_accumulation_steps())

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether `step()` updates, with what `backward` has summed; None: count the calls."""
        self._accumulation.boundary = is_boundary

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Forbid `step()` inside this context. Valid at every stage, because only `step()` reduces gradients."""
        return self._accumulation.no_sync()

    @property
    def metrics(self) -> Metrics:
        """The last step's loss, grad_norm, lr, loss_scale and skipped, on the device; empty before the first step."""
        return {} if self._metrics is None else self._metrics

    @property
    def global_rank(self) -> int:
        return get_rank()

    @property
    def local_rank(self) -> int:
        return get_local_rank()

    @property
    def world_size(self) -> int:
        return get_world_size()

    def train_batch_size(self) -> int:
        return self.step_fn.batch_sizes.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation; the next step compiles for it.

        Call it after `load_checkpoint`, which restores the checkpoint's global batch unless the config names another.
        """
        self._accumulation.check_empty("set_train_batch_size")
        self.step_fn.set_train_batch_size(train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.step_fn.batch_sizes.micro

    def gradient_accumulation_steps(self) -> int:
        return self.step_fn.batch_sizes.accum

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_lr(self) -> list[float]:
        """Return the next step's learning rate in each group, in the config's order; last that of all others."""
        return [
            float(self.step_fn.lr(self.live_state)) * group.lr_scale for group in self.step_fn.setup.optimizer.groups
        ]

    def get_last_lr(self) -> list[float]:
        """Return the last step's learning rate in each group; before the first step, the next one's."""
        if self._metrics is None:
            return self.get_lr()
        return [float(self._metrics["lr"]) * group.lr_scale for group in self.step_fn.setup.optimizer.groups]

    def set_lr(self, lr: float) -> None:
        """Run the next steps at another learning rate; see `TrainStep.set_lr`. Checkpoints keep it."""
        self.step_fn.set_lr(lr)

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's gradient norm over all parameters, before clipping; None before the first step."""
        return None if self._metrics is None else float(self._metrics["grad_norm"])

    def was_step_applied(self) -> bool:
        """Return whether the last step changed the parameters."""
        return self._metrics is not None and not bool(self._metrics["skipped"])

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Set the lengths of `schedule_type` "custom": {"seqlen": function}, from the step (first 1) to its length.

        Call it again after a restart: checkpoints keep no functions. All processes need the same one.
        """
        found = self._curriculum("set_custom_curriculum_learning_schedule")
        if set(schedule_func_dict) != {METRIC}:
            raise ConfigError(
                f"set_custom_curriculum_learning_schedule({list(schedule_func_dict)}): write {METRIC!r}: function"
            )
        found.custom = schedule_func_dict[METRIC]

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict], Any]) -> None:
        """Cut the batches of training steps by a function of your own instead of by the rule in [Data](data.md).

        It takes a batch or a micro-batch (with a criterion outside of the model the inputs, then the labels), and
        {"curriculum_step": step, "current_difficulties": {"seqlen": length}}. It returns the batch.
        """
        self._curriculum("set_data_post_process_func").post_process = post_process_func

    def _curriculum(self, call: str) -> Curriculum:
        if self.curriculum is None:
            raise ConfigError(f"{call}: the config has no curriculum; add curriculum_learning with enabled = true")
        return self.curriculum

    def seconds_per_step(self) -> float | None:
        """Return the mean time of the last steps that the devices finished, at most 50; None before two."""
        return self._observers.completed.step_s

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds per step of each part that `wall_clock_breakdown` printed last; {} before that."""
        return dict(self._observers.lines.times)

    @property
    def skipped_steps(self) -> int:
        return int(self.live_state.loss_scale.skipped)

    @property
    def loss_scale(self) -> float:
        return _LossScale(self.live_state.loss_scale.scale)

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage
