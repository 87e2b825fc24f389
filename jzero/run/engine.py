"""The engine: DeepSpeed's methods around a train step, its state and its counters."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from jzero.data import DataLoader, RepeatingLoader
from jzero.data.curriculum import Part, curriculum_of
from jzero.distributed import last_words, preemption
from jzero.errors import ConfigError, refuse_keywords
from jzero.events import EVENTS, EvaluationGiven, StepGiven
from jzero.loss import LOSS
from jzero.run.checkpoints import CheckpointedRun, save_and_exit
from jzero.run.clock import DEVICE, HOST
from jzero.run.deepspeed_names import KEYWORDS
from jzero.run.deferred_loss import Loss, Outputs, check_outputs, deferred_outputs
from jzero.run.diagnosis.step_checks import Checks
from jzero.run.find_checkpoint import warn_if_not_resumed
from jzero.run.micro_batches import Accumulation, Held, next_micro_batches, one_batch, position
from jzero.run.observers import Observers
from jzero.run.step_memory import check_memory, explain_out_of_memory, fits_data
from jzero.step.programs import StepResult
from jzero.step.train_step import Metrics, TrainStep

E = TypeVar("E")


class Engine(CheckpointedRun):
    """The training engine, made by `initialize`: `engine.train_batch(batch)`, or forward, backward, step.

    Attributes:
      step_fn: the TrainStep. mesh, config: the step's.
      state: the TrainState; read or replace it freely.
      curriculum: the lengths of the training sequences; None without curriculum learning in the config.
      global_steps, global_samples, micro_steps: counts since step 0, across resumes.
      eval_metrics: loss and metrics of the last evaluation.
      client_state: the notes of the last save, or of the checkpoint that was resumed.
    """

    def __init__(
        self, step_fn: TrainStep, rng: jax.Array, loader: DataLoader | None = None,
        resume: Path | None = None, params: Any = None, began: float | None = None,
    ):  # fmt: skip
        self.step_fn, self.config, self.mesh = step_fn, step_fn.config, step_fn.mesh
        self._rng = rng
        self.training_dataloader = loader
        self.client_state: dict = {}
        self._batches = None if loader is None else RepeatingLoader(loader)
        self._accumulation = Accumulation(self.config.managed_gradient_accumulation)
        self.curriculum, self._training = curriculum_of(self.config), True
        # The last forward pass of a model with a criterion, until the update: its outputs and its inputs.
        self._outputs: tuple[Outputs | None, Any] = None, None
        self._metrics: Metrics | None = None
        self.eval_metrics: Metrics = {}
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._observers = observers = Observers(step_fn, resume, began, self.curriculum)
        self._functions: dict[type, list[Callable[[Any], object]]] = {}  # by `on`
        # With the engine, or at the program's end. The common hook of all finalizers may be older than that of
        # `joining`, which leaves the process at once.
        atexit.register(weakref.finalize(self, observers.close))
        self._checks = Checks(step_fn, observers)
        observers.lines.memory("before the state")
        self._home = resume  # where SIGTERM saves
        self.state: Any = None
        if self._home:
            self._resume(self._home)
            preemption.listen()
        elif self.config.checkpoint.dir:
            warn_if_not_resumed(self.config.checkpoint.dir)
        if self.state is None:
            self.state = step_fn.init(rng, params)
            self._started()
        observers.lines.memory("with the state", self.state)
        # Whether the memory of the first step was compared with the devices'.
        self._fits = loader is not None and fits_data(step_fn, loader, self._cut, self._checks.begin(self))

    def __repr__(self) -> str:
        return f"Engine({self.step_fn!r}, global step {self.global_steps})"

    # ------------------------------------------------------------------ one call

    def train_batch(self, batch: Any = None, *, data_iter: Iterator[Any] | None = None, extra: Any = None) -> jax.Array:
        """Run one optimizer step on one global batch; return its mean loss.

        Args:
          batch: a global batch (leading dimension `train_batch_size()`); or an iterator of micro-batches (leading
            dimension micro x replicas), from which the engine takes `gradient_accumulation_steps()`; or None: the
            training data. The last two have the same micro-batches on every mesh; of a global batch each device cuts
            its own rows, see `TrainStep`.
          data_iter: DeepSpeed's name for such an iterator.
          extra: arrays and numbers that the loss takes besides the batch, as for `TrainStep`.
        """
        self._accumulation.check_empty("train_batch")
        if batch is not None and data_iter is not None:
            raise ConfigError("train_batch() has a batch and a data_iter: pass one of them")
        batch = data_iter if batch is None else batch
        source = self._batches if batch is None else batch
        if source is None:
            raise ConfigError("train_batch() has no batch: pass one, or pass training_data to jzero.initialize")
        accum = self.step_fn.batch_sizes.accum
        if isinstance(source, Iterator):
            ours, rows = source is self._batches, self.step_fn.micro_size
            parts = next_micro_batches(source, accum, ours=ours, timed=self._observers.clock.part)
        else:
            parts, rows = [source], self.step_fn.batch_sizes.train
        if self.curriculum is not None:
            parts = [self._cut(part) for part in parts]
        done = self._take_step(parts, extra, rows, accum, counted=accum)
        return done[1]["loss"]

    def eval_batch(
        self, batch: Any = None, extra: Any = None, *, data_iter: Iterator[Any] | None = None, ema: bool = False,
        **deepspeed: Any,
    ) -> jax.Array:  # fmt: skip
        """Compute the loss of a batch (or an iterator of micro-batches) without dropout and without an update.

        With `ema`, of the moving average of the parameters. `eval_metrics` has the model's metrics on this batch then.
        """
        refuse_keywords("eval_batch", deepspeed, KEYWORDS["eval_batch"])
        if (batch is None) == (data_iter is None):
            raise ConfigError("eval_batch: pass one of batch and data_iter, an iterator of micro-batches")
        batch = data_iter if batch is None else batch
        parts = [batch]
        if isinstance(batch, Iterator):
            parts = next_micro_batches(batch, self.gradient_accumulation_steps(), ours=batch is self._batches)
        return self._evaluate(parts, extra, ema)

    def _evaluate(self, parts: Sequence[Any], extra: Any = None, ema: bool = False) -> jax.Array:
        state = self.step_fn.averaged(self.state) if ema else self.state
        found, began = self._observers.run_evaluation(lambda: self.step_fn.evaluate_parts(state, parts, extra))
        loss, metrics = found if isinstance(found, tuple) else (found, {})
        self.eval_metrics = {LOSS: loss, **metrics}
        self._observers.emit(EvaluationGiven(self.global_steps, self.global_samples, dict(self.eval_metrics), began))
        self._tell()
        return loss

    def __call__(self, *batch: Any, extra: Any = None, **named: Any) -> Any:
        """Compute the loss of one micro-batch of all replicas (leading dimension micro x replicas).

        `engine(**batch)` is `engine(batch)`, and returns the loss itself.

        With a criterion outside of the model, a micro-batch is its inputs alone, and this returns the outputs: pass
        them to `engine.loss(outputs, labels)`.

        Args:
          extra: as for `train_batch`; the same for all micro-batches of a step.
        """
        micro_batch = one_batch(batch, named)
        if self._training:
            micro_batch = self._cut(micro_batch, "inputs" if hasattr(self.step_fn.model, "criterion") else "batch")
        if hasattr(self.step_fn.model, "criterion"):
            if extra is not None:
                raise ConfigError(
                    "engine(inputs, extra=...): the criterion takes it; engine.loss(outputs, labels, extra)"
                )
            index = len(self._accumulation.queue) if self._training else None
            self._outputs = deferred_outputs(self.step_fn, self.live_state, micro_batch, index)
            return self._outputs[0]
        return self._loss(micro_batch, extra)

    forward = __call__

    def loss(self, outputs: Outputs, labels: Any, extra: Any = None) -> Any:
        """Compute the criterion of the outputs that `engine(inputs)` just returned, and labels for the same rows."""
        last, inputs = self._outputs
        check_outputs(self.step_fn.model, outputs, last)
        labels = self._cut(labels, "labels") if self._training else labels
        return self._loss((inputs, labels), extra)

    def _loss(self, micro_batch: Any, extra: Any) -> Any:
        if not self._training:
            return self._evaluate([micro_batch], extra)
        with self._observers.clock.part(HOST):
            state, micro_batch = self.live_state, self.step_fn.place_micro_batch(micro_batch)
        index = len(self._accumulation.queue)

        def compute() -> jax.Array:
            if state.step.is_deleted():
                raise ConfigError(
                    "this loss was not computed before a later step replaced its parameters: read it before that "
                    "step, or pass it to engine.backward"
                )
            return self.step_fn.micro_loss(state, micro_batch, index, extra)

        loss = Loss(compute)
        self._accumulation.forward = Held(micro_batch, loss, extra)
        return loss

    def backward(self, loss: Loss, *, scale_wrt_gas: bool = True, **deepspeed: Any) -> Loss:
        """Add the gradient of `loss`, the last loss that the engine returned, to this step's.

        As in DeepSpeed, the gradients of all calls before a step are summed, each divided by
        `gradient_accumulation_steps()`, unless `scale_wrt_gas` is false. (With a `Mean` as loss the sum is that number
        of times the mean over all their elements.)
        """
        refuse_keywords("backward", deepspeed, KEYWORDS["backward"])
        self._accumulation.add(loss, scale_wrt_gas)
        self.micro_steps += 1
        return loss

    def step(self, **deepspeed: Any) -> None:
        """Update the parameters at an accumulation boundary; elsewhere only count the call."""
        refuse_keywords("step", deepspeed, KEYWORDS["step"])
        accum = self.gradient_accumulation_steps()
        queue = self._accumulation.finish(accum)
        self._outputs = None, None
        if not queue:
            return
        factor = self._accumulation.factor(len(queue), accum)
        batches, rows = [held.batch for held in queue], self.step_fn.micro_size
        self._take_step(batches, queue[0].extra, rows, len(queue), factor, held=queue)

    def _take_step(
        self, parts: Sequence[Any], extra: Any, rows: int, micro_batches: int, factor: float = 1.0, counted: int = 0,
        held: Sequence[Held] = (),
    ) -> StepResult:  # fmt: skip
        """Take a step on micro-batches, in parts of `rows` rows.

        Args:
          counted: the micro-batches that are not yet in `micro_steps`.
          held: those of the three-call loop, whose losses are now known.
        """
        step, clock = self.step_fn, self._observers.clock
        skip, samples = self._checks.begin(self), micro_batches * step.micro_size

        def run() -> StepResult:
            fed = step.prepare(parts, extra, skip, rows=rows, factor=factor)
            if not self._fits:
                check_memory(step)
                self._fits = True
            return step.run(self.state, fed, skip)

        try:
            done, began = self._observers.run_step(run, self.global_steps + 1)
            self.state, self._metrics, details = done
            self.global_steps += 1
            self.global_samples += samples
            self.micro_steps += counted
            last_words.record_step(self.global_steps)
            stopped = self._checks.finish(self, self._metrics, details)  # waits for the step before
            clock.lap(DEVICE)
            if stopped:
                self._stop_for(stopped)
        except jax.errors.JaxRuntimeError as error:
            explain_out_of_memory(step, error)
            raise
        last = self._home is not None and preemption.reached()
        length = None if self.curriculum is None else self.curriculum.length(self.global_steps)
        given = StepGiven(
            self.global_steps, self.global_samples, samples, step.amount.tokens,
            self._metrics, details.loss_scale.skipped, position(self.training_dataloader), length, last, began,
            clock.lap(HOST),
        )  # fmt: skip
        self._observers.emit(given)
        clock.lap(HOST)
        for i, one in enumerate(held):
            one.loss.replace(lambda losses=details.micro_losses, i=i: losses[i])  # type: ignore[misc]
        self._tell()
        if last:  # this call does not return, and the script never gets the loss
            save_and_exit(lambda: self.save_checkpoint(self._home, client_state=self.client_state))
        return done

    # ------------------------------------------------------------------ events

    def on(self, event: type[E], function: Callable[[E], object]) -> None:
        """Call a function at each event of a type of `jzero.events`.

        It is called in the script's thread, at the end of one of the engine's calls, such as `train_batch`: there it
        may evaluate and save. At `StepGiven` the state is that after the step, on all processes; a `StepEnded` comes
        when the devices have finished the step, so maybe one call later, and not on all processes at once.
        """
        if event not in EVENTS:
            names = ", ".join(one.__name__ for one in EVENTS)
            raise ConfigError(f"engine.on({event!r}, ...): must be a type of event of jzero.events: {names}")
        if not callable(function):
            raise ConfigError(f"engine.on({event.__name__}, {function!r}): must be a function that takes the event")
        self._functions.setdefault(event, []).append(function)
        self._observers.want(event)

    def _tell(self) -> None:
        """Call the user's functions for what has happened."""
        if self._functions:
            for event in self._observers.told():
                for function in self._functions[type(event)]:
                    function(event)

    def _cut(self, batch: Any, part: Part = "batch") -> Any:
        """Cut a batch to the sequence length of the next step, if the config has a curriculum."""
        return batch if self.curriculum is None else self.curriculum.cut(batch, self.global_steps + 1, part=part)
