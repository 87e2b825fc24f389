"""The engine: DeepSpeed's methods around a train step, its state and its counters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jzero import checkpoint, weights
from jzero.checkpoint.tags import DEFAULT_TAG
from jzero.data import DataLoader, RepeatingLoader
from jzero.data.curriculum import curriculum_of
from jzero.diagnosis.checks import Checks
from jzero.distributed import last_words, preemption
from jzero.distributed.place import log_dist
from jzero.engine import progress, restore
from jzero.engine.accumulation import Accumulation, Held
from jzero.engine.clock import DEVICE, EVALUATION, HOST
from jzero.engine.criterion import Outside, check_criterion
from jzero.engine.deferred_loss import Loss, Outputs
from jzero.engine.monitor import Monitor
from jzero.engine.newest import resume_from, warn, warn_if_not_resumed
from jzero.engine.restore import Selection
from jzero.engine.room_check import check_data, check_room, out_of_memory
from jzero.engine.stop import save_and_exit
from jzero.engine.take import take
from jzero.engine.views import Views
from jzero.errors import ConfigError
from jzero.loss import LOSS
from jzero.programs import Done
from jzero.state import check_alive
from jzero.train_step import Metrics, TrainStep


class Engine(Views):
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
        step_fn.before_first = check_room
        self._rng = rng
        self.training_dataloader = loader
        self.client_state: dict = {}
        self._batches = None if loader is None else RepeatingLoader(loader)
        self._accumulation = Accumulation(self.config.managed_gradient_accumulation)
        self._outside, self.curriculum, self._training = Outside(), curriculum_of(self.config), True
        self._metrics: Metrics | None = None
        self.eval_metrics: Metrics = {}
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._monitor = Monitor(step_fn, resume, began)
        self._checks = Checks(step_fn, self._monitor)
        self._monitor.lines.memory("before the state")
        self._home = resume  # where SIGTERM saves
        self.state: Any = None
        if self._home:
            self._resume(self._home)
            preemption.listen()
        elif self.config.checkpoint.dir:
            warn_if_not_resumed(self.config.checkpoint.dir)
        if self.state is None:
            self.state = step_fn.init(rng, params)
            self._monitor.restarted(self)
        self._monitor.lines.memory("with the state", self.state)
        if loader is not None:
            check_data(step_fn, loader, self._cut, self._checks.begin(self))

    def __repr__(self) -> str:
        return f"Engine({self.step_fn!r}, global step {self.global_steps})"

    # ------------------------------------------------------------------ one call

    def train_batch(self, batch: Any = None, *, data_iter: Iterator[Any] | None = None, extra: Any = None) -> jax.Array:
        """Run one optimizer step on one global batch; return its mean loss.

        Args:
          batch: a global batch (leading dimension `train_batch_size()`); or an iterator of micro-batches (leading
            dimension micro x replicas), from which the engine takes `gradient_accumulation_steps()`; or None: the
            training data.
          data_iter: DeepSpeed's name for such an iterator.
          extra: arrays and numbers that the loss takes beside the batch, as for `TrainStep`.
        """
        self._accumulation.check_empty("train_batch")
        if batch is not None and data_iter is not None:
            raise ConfigError("train_batch() has a batch and a data_iter: pass one of them")
        batch = data_iter if batch is None else batch
        source = self._batches if batch is None else batch
        if source is None:
            raise ConfigError("train_batch() has no batch: pass one, or pass training_data to jzero.initialize")
        if isinstance(source, Iterator):
            parts = take(
                source, self.gradient_accumulation_steps(), ours=source is self._batches, part=self._monitor.part
            )
            done = self._run(self.step_fn.run_micro_batches, [self._cut(part) for part in parts], extra)
        else:
            done = self._run(self.step_fn.run, self._cut(source), extra)
        self.micro_steps += self.gradient_accumulation_steps()
        self._finish(done, self.gradient_accumulation_steps())
        return done[1]["loss"]

    def eval_batch(self, batch: Any, extra: Any = None, *, ema: bool = False) -> jax.Array:
        """Compute the loss of a batch (or an iterator of micro-batches) without dropout and without an update.

        With `ema`, of the moving average of the parameters. `eval_metrics` has the model's metrics on this batch then.
        """
        if isinstance(batch, Iterator):
            batch = self.step_fn.join(take(batch, self.gradient_accumulation_steps(), ours=batch is self._batches))
        return self._evaluate(batch, extra, ema)

    def _evaluate(self, batch: Any, extra: Any = None, ema: bool = False) -> jax.Array:
        state = self.step_fn.averaged(self.state) if ema else self.state
        with self._monitor.part(EVALUATION):
            found = self._monitor.evaluated(self.step_fn.evaluate(state, batch, extra))
        loss, metrics = found if isinstance(found, tuple) else (found, {})
        self.eval_metrics = {LOSS: loss, **metrics}
        self._monitor.evaluation(self, self.eval_metrics)
        return loss

    def __call__(self, micro_batch: Any, extra: Any = None) -> Any:
        """Compute the loss of one micro-batch of all replicas (leading dimension micro x replicas).

        With a criterion outside of the model, a micro-batch is its inputs alone, and this returns the outputs: pass
        them to `engine.loss(outputs, labels)`.

        Args:
          extra: as for `train_batch`; the same for all micro-batches of a step.
        """
        if self._training:
            micro_batch = self._cut(micro_batch, 0 if hasattr(self.step_fn.model, "criterion") else None)
        if hasattr(self.step_fn.model, "criterion"):
            if extra is not None:
                raise ConfigError(
                    "engine(inputs, extra=...): the criterion takes it; engine.loss(outputs, labels, extra)"
                )
            index = len(self._accumulation.queue) if self._training else None
            return self._outside.forward(self.step_fn, self.state, micro_batch, index)
        return self._loss(micro_batch, extra)

    forward = __call__

    def loss(self, outputs: Outputs, labels: Any, extra: Any = None) -> Any:
        """Compute the criterion of the outputs that `engine(inputs)` just returned, and labels for the same rows."""
        check_criterion(self.step_fn.model)
        labels = self._cut(labels, 1) if self._training else labels
        return self._loss(self._outside.batch(outputs, labels), extra)

    def _loss(self, micro_batch: Any, extra: Any) -> Any:
        if not self._training:
            return self._evaluate(micro_batch, extra)
        with self._monitor.part(HOST):
            micro_batch, state = self.step_fn.place_micro_batch(micro_batch), self.state
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

    def backward(self, loss: Loss) -> Loss:
        """Add the micro-batch of `loss`, the last loss that the engine returned, to this step's gradient."""
        self._accumulation.add(loss)
        self.micro_steps += 1
        return loss

    def step(self) -> None:
        """Update the parameters at an accumulation boundary; elsewhere only count the call."""
        queue = self._accumulation.finish(self.gradient_accumulation_steps())
        self._outside.forget()
        if not queue:
            return
        done = self._run(self.step_fn.run_micro_batches, [held.batch for held in queue], queue[0].extra)
        self._finish(done, len(queue))
        for i, held in enumerate(queue):
            held.loss.replace(lambda losses=done[2].micro_losses, i=i: losses[i])  # type: ignore[misc]

    def zero_grad(self) -> None:
        """Do nothing: every step begins without gradients. An error while micro-batches wait for `step()`."""
        self._accumulation.check_empty("zero_grad")

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the parameters.

        It does at every gradient_accumulation_steps()-th call, when that number of micro-batches waits (after
        `no_sync`), or as `set_gradient_accumulation_boundary` decides.
        """
        return self._accumulation.is_boundary(self.gradient_accumulation_steps())

    def set_gradient_accumulation_boundary(self, boundary: bool | None) -> None:
        """Set whether `step()` updates, with the mean over the waiting micro-batches; None: count the calls."""
        self._accumulation.boundary = boundary

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Forbid `step()` inside this context. Valid at every stage, because only `step()` reduces gradients."""
        return self._accumulation.no_sync()

    def _run(self, run: Callable[..., Done], batch: Any, extra: Any) -> Done:
        only = self._checks.begin(self)
        with out_of_memory(self.step_fn):
            return self._monitor.run(lambda: run(self.state, batch, extra, only), self.global_steps + 1)

    def _finish(self, done: Done, micro_batches: int) -> None:
        self.state, self._metrics, details = done
        self.global_steps += 1
        last_words.passed(self.global_steps)
        self.global_samples += micro_batches * self.step_fn.micro_size
        with self._monitor.part(DEVICE), out_of_memory(self.step_fn):  # waits for the step before
            self._checks.finish(self, self._metrics, details)
        last = self._home is not None and preemption.reached()
        self._monitor.finish(self, details.loss_scale.skipped, last)
        if last:  # this call does not return, and the script never gets the loss
            save_and_exit(lambda: self.save_checkpoint(self._home, client_state=self.client_state))

    def _cut(self, batch: Any, part: int | None = None) -> Any:
        """Cut a batch to the sequence length of the next step, if the config has a curriculum."""
        return batch if self.curriculum is None else self.curriculum.cut(batch, self.global_steps + 1, part=part)

    # ------------------------------------------------------------------ modes and sizes

    def train(self, mode: bool = True) -> Engine:
        """Switch to training mode: `engine(micro_batch)` takes part in the next step."""
        self._training = mode
        return self

    def eval(self) -> Engine:
        """Switch to evaluation mode: `engine(micro_batch)` only computes the loss, without dropout."""
        return self.train(False)

    def set_train_batch_size(self, size: int) -> None:
        """Change the global batch by changing the accumulation; the next step compiles for it.

        Call it after `load_checkpoint`, which restores the checkpoint's global batch unless the config names another.
        """
        self._accumulation.check_empty("set_train_batch_size")
        unit = self.step_fn.micro_size
        if size < 1 or size % unit:
            raise ConfigError(f"train_batch_size = {size}: must be a multiple of {unit} (micro-batch x replicas)")
        self.step_fn.batch_sizes = self.step_fn.batch_sizes._replace(train=size, accum=size // unit, inferred="")

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, save_dir: str | os.PathLike | None = None, tag: str | float | None = None,
        client_state: Mapping | None = None, save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> checkpoint.Save:  # fmt: skip
        """Save the whole state as save_dir/tag while training goes on; all processes call it.

        Args:
          save_dir: default: the directory that the run resumed from, or the config's `checkpoint.dir`.
          tag: default `global_step{N}`.
          client_state: JSON values; `load_checkpoint` returns them, and a resume puts them in `engine.client_state`.
            A save on SIGTERM reuses the last ones.
          save_latest: write the tag to save_dir/latest.
          exclude_frozen_parameters: leave out the parameters that are not trained.

        Returns:
          The save in progress: `.wait()` waits until it is complete. Another save, a load and the program's end wait.

        Raises:
          ConfigError, CheckpointError: see `jzero.checkpoint.save`.
        """
        self._accumulation.check_empty("save_checkpoint")
        self._checks.settle(self)
        check_alive(self.state)
        former = self.client_state
        self.client_state = dict(client_state) if isinstance(client_state, Mapping) else client_state or {}
        step, counters = self.step_fn, {name: getattr(self, name) for name in progress.COUNTERS}
        frozen = [f"params/{layout.name}" for layout in jax.tree.leaves(step.layouts) if not layout.trainable]
        try:
            with self._monitor.saving():
                return checkpoint.save(
                    self.state, save_dir or self._home or self.config.checkpoint.dir or "",
                    DEFAULT_TAG.format(self.global_steps) if tag is None else tag,
                    notes=progress.make_notes(step, self.training_dataloader, counters, self.client_state),
                    latest=save_latest, without=frozen if exclude_frozen_parameters else (),
                    max_to_keep=self.config.checkpoint.max_to_keep,
                )  # fmt: skip
        except ConfigError:
            self.client_state = former
            raise

    def load_checkpoint(
        self, load_dir: str | os.PathLike | None = None, tag: str | float | None = None,
        load_module_strict: bool = True, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
        load_module_only: bool = False, custom_load_fn: None = None,
    ) -> tuple[str, dict]:  # fmt: skip
        """Read a checkpoint of any layout; return (path, client_state). All processes call it.

        The engine drops its former state before it reads the new one, so that both need not fit into memory.

        Args:
          load_dir: default: the directory that the run resumed from, or the config's `checkpoint.dir`.
          tag: default: the one in load_dir/latest.
          load_module_strict: False: read what fits, and keep the rest as it is.
          load_optimizer_states: False: keep the optimizer's state, except for its position in the schedule.
          load_lr_scheduler_states: False: keep the current position in the learning-rate schedule.
          load_module_only: read the parameters alone, without counters or the position in the data.

        Raises:
          ConfigError: there is no checkpoint, or it belongs to another model or optimizer; the error names the leaves
            that differ.
          CheckpointError: the checkpoint is damaged.
        """
        self._accumulation.check_empty("load_checkpoint")
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: read with jzero.checkpoint.restore and set engine.state instead")
        found = checkpoint.Checkpoint.find(load_dir or self._home or self.config.checkpoint.dir, tag)
        self._accumulation.forward = None
        self._load(
            found, Selection(load_module_strict, load_module_only, load_optimizer_states, load_lr_scheduler_states)
        )
        self._metrics = None
        self._checks.restart()
        return str(found.path), progress.client_state(found.notes)

    def _load(self, source: checkpoint.Checkpoint, selection: Selection) -> None:
        """Replace the state with a checkpoint's.

        The order matters. The checks run first, so that an error leaves the engine intact. Then the engine drops its
        state, because two states may not fit into memory. Then it reads the new one.
        """
        plan = restore.plan(source, self.step_fn, self.state, selection)
        if not selection.only_module:
            self._take_position(source.notes)
        self.state = None
        self.state = plan.read()
        if not selection.only_module:
            self._take_counters(source)

    def _take_position(self, notes: Mapping[str, Any]) -> None:
        """Set the global batch and the position in the data to the checkpoint's."""
        if not progress.written_by_engine(notes):
            return
        train, remark = progress.global_batch(notes, self.step_fn)
        if train != self.train_batch_size():
            self.set_train_batch_size(train)
        if remark:
            log_dist(remark)
        if self.training_dataloader is not None and notes["data"] is not None:
            self.training_dataloader.seek(notes["data"])

    def _take_counters(self, source: checkpoint.Checkpoint) -> None:
        """Set the counters and the user's notes to the checkpoint's; warn if the precision or the data changed."""
        notes, step = source.notes, int(self.state.step)  # the one counter in a checkpoint that no engine wrote
        counters = progress.counters(notes, step, self.gradient_accumulation_steps(), self.train_batch_size())
        self.global_steps, self.global_samples, self.micro_steps = (counters[name] for name in progress.COUNTERS)
        self.client_state = progress.client_state(notes)
        self.step_fn.rate = progress.rate(notes, self.step_fn)
        self._monitor.restarted(self, source.path)
        for problem in progress.changes(self.training_dataloader, notes, self.step_fn, step):
            warn(problem)

    def _resume(self, home: Path) -> None:
        """Load the newest readable checkpoint, if there is one."""

        def load(source: checkpoint.Checkpoint) -> int:
            if source.without:  # the frozen parameters come from the model
                self.state = self.step_fn.init(self._rng)
            self._load(source, Selection())
            return self.global_steps

        resume_from(home, load)

    def load_weights(
        self, directory: str | os.PathLike, *, rename: Mapping[str, str] | None = None, missing: Sequence[str] = ()
    ) -> None:
        """Start at step 0 with a directory's safetensors and a new optimizer; see `weights.load`. Missing ones stay."""
        self._accumulation.check_empty("load_weights")
        if self._home and self.global_steps:
            raise ConfigError(
                f"load_weights: this run was resumed at step {self.global_steps} and would start at step 0 again: call "
                "it only if not engine.global_steps"
            )
        old = self.state and self.state.params
        params = weights.load(directory, self.step_fn, params=old, rename=rename, missing=missing)
        self.state = old = None  # frees the memory before `init` needs it
        self.state = self.step_fn.init(self._rng, params, donate=True)
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._metrics, self._accumulation.forward = None, None
        self._checks.restart()
        if self.training_dataloader is not None:
            self.training_dataloader.seek({"epoch": 0, "samples": 0})
        self._monitor.restarted(self, directory)
