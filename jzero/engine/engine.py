"""The DeepSpeed-shaped engine: a train step, its state, and the counters users ask for."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero import checkpoint, weights
from jzero.checkpoint.directory import DEFAULT_TAG
from jzero.data import DataLoader, RepeatingLoader
from jzero.distributed import preemption
from jzero.distributed.exit_codes import SAVED
from jzero.distributed.host_collectives import anyone
from jzero.distributed.place import get_local_rank, get_rank, get_world_size, log_dist
from jzero.engine import restore as resuming
from jzero.engine.deferred_loss import Loss
from jzero.errors import ConfigError
from jzero.loss_scale import check_stuck
from jzero.train_step import Details, Metrics, TrainStep


class Engine:
    """A model in training: `loss = engine.train_batch(batch)`, or forward, backward, step. Made by `initialize`.

    Attributes: `step_fn` (the TrainStep), `state` (the TrainState; yours to read and to replace), `mesh`, `config`;
    `global_steps`, `global_samples`, `micro_steps`: done so far, those before a resume included; `client_state`: what
    the last save was given, or the checkpoint held that was resumed.
    """

    def __init__(
        self, step_fn: TrainStep, rng: jax.Array, loader: DataLoader | None = None,
        resume: str | os.PathLike | None = None,
    ):  # fmt: skip
        self.step_fn, self.config, self.mesh = step_fn, step_fn.config, step_fn.mesh
        self._rng = rng
        self.training_dataloader = loader
        self.client_state: dict = {}
        self._batches = None if loader is None else RepeatingLoader(loader)
        self._queue: list[tuple[Any, Loss]] = []  # micro-batches whose backward was called, in order
        self._forward: tuple[Any, Loss] | None = None
        self._training, self._syncing = True, True
        self._boundary: bool | None = None
        self._steps_waiting = 0  # calls of step() since the last that updated
        self._metrics: Metrics | None = None
        self._details: Details | None = None
        self.global_steps = self.global_samples = self.micro_steps = 0
        self.restart_clock()
        self._home = Path(resume).absolute() if resume else None  # where SIGTERM saves
        self.state: Any = None
        if self._home:
            resuming.start(self, self._home, rng)
            preemption.listen()
        else:
            resuming.begin(self, rng)

    def __repr__(self) -> str:
        return f"Engine({self.step_fn!r}, global step {self.global_steps})"

    # ------------------------------------------------------------------ one call

    def train_batch(self, batch: Any = None, *, data_iter: Iterator[Any] | None = None) -> jax.Array:
        """One optimizer step on one global batch; its mean loss.

        Args:
          batch: a global batch (leading dimension `train_batch_size()`), an iterator of micro-batches (leading
            dimension micro x replicas), of which `gradient_accumulation_steps()` are taken, or None: the training data.
          data_iter: DeepSpeed's name for such an iterator.
        """
        self._check_no_pending("train_batch")
        batch = data_iter if batch is None else batch
        source = self._batches if batch is None else batch
        if source is None:
            raise ConfigError("train_batch() has no batch: pass one, or pass training_data to jzero.initialize")
        if isinstance(source, Iterator):
            parts = self._take(source)
            done = self.step_fn.run_micro_batches(self.state, parts)
        else:
            done = self.step_fn.run(self.state, source)
        self.micro_steps += self.gradient_accumulation_steps()
        self._finish(done, self.gradient_accumulation_steps())
        return done[1]["loss"]

    def eval_batch(self, batch: Any) -> jax.Array:
        """The loss of a batch (or an iterator of micro-batches) without dropout and without an update."""
        if isinstance(batch, Iterator):
            batch = self.step_fn.join(self._take(batch))
        return self.step_fn.evaluate(self.state, batch)

    def _take(self, source: Iterator[Any]) -> list[Any]:
        accum = self.gradient_accumulation_steps()
        parts = list(itertools.islice(source, accum))
        short = None
        if len(parts) < accum:
            of = f" of process {jax.process_index()}" if jax.process_count() > 1 else ""
            again = "jzero.RepeatingLoader starts a loader again"
            if source is self._batches:
                again = "training_data was an iterator, which is used up: give a function that makes one"
            short = (
                f"the iterator{of} ended after {len(parts)} of {accum} micro-batches (gradient_accumulation_steps = "
                f"{accum}); {again}"
            )
        if short := anyone("the data's end", short):  # or the others would wait for ever
            raise ConfigError(short)
        return parts

    # ------------------------------------------------------------------ three calls

    def __call__(self, micro_batch: Any) -> Any:
        """The loss of one micro-batch of all replicas (leading dimension micro x replicas)."""
        if not self._training:
            return self.step_fn.evaluate(self.state, micro_batch)
        micro_batch, index, state = self.step_fn.place_micro_batch(micro_batch), len(self._queue), self.state

        def compute() -> jax.Array:
            if state.step.is_deleted():
                raise ConfigError(
                    "this loss was never computed, and a step that it had no part in has replaced its parameters: "
                    "read it before that step, or pass it to engine.backward"
                )
            return self.step_fn.micro_loss(state, micro_batch, index)

        self._forward = (micro_batch, Loss(compute))
        return self._forward[1]

    forward = __call__

    def backward(self, loss: Loss) -> Loss:
        """Take the micro-batch of `loss`, the last one that the engine returned, into this step's gradient."""
        if self._forward is None or loss is not self._forward[1]:
            raise ConfigError(
                f"backward: {loss!r} is not the loss that the last engine(micro_batch) returned; what changes the "
                "loss belongs into the model's loss function"
            )
        self.micro_steps += 1
        self._queue.append(self._forward)
        self._forward = None
        return loss

    def step(self) -> None:
        """At an accumulation boundary, update the parameters with the micro-batches since the last one; else count."""
        if not self._syncing:
            raise ConfigError("step() inside no_sync(): leave the context first")
        if not self._queue:
            raise ConfigError("step() without a backward(): call engine.backward(engine(micro_batch)) first")
        self._forward = None  # a forward pass without a backward takes no part
        boundary = self.is_gradient_accumulation_boundary()
        self._steps_waiting = 0 if boundary else self._steps_waiting + 1
        if not boundary:
            return
        queue, self._queue = self._queue, []
        done = self.step_fn.run_micro_batches(self.state, [part for part, _ in queue])
        self._finish(done, len(queue))
        for i, (_, loss) in enumerate(queue):
            loss.replace(lambda losses=done[2].micro_losses, i=i: losses[i])  # type: ignore[misc]

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates: it is the last of gradient_accumulation_steps() calls, or that many
        micro-batches wait (as after `no_sync`), or `set_gradient_accumulation_boundary` said so."""
        if self._boundary is not None:
            return self._boundary
        waiting = max(self._steps_waiting + 1, len(self._queue) + (self._forward is not None))
        return not self.config.managed_gradient_accumulation or waiting >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, boundary: bool | None) -> None:
        """Decide by hand whether `step()` updates; None goes back to counting. The loss is the mean over what came."""
        self._boundary = boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """No gradient reduction inside: as always here, where `step()` reduces once. Legal at every stage."""
        if not self._syncing:
            raise ConfigError("no_sync() inside no_sync(): one is enough")
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def _check_no_pending(self, call: str) -> None:
        if self._queue:
            raise ConfigError(f"{call}: {len(self._queue)} micro-batches wait for step(); call engine.step() first")

    # ------------------------------------------------------------------ after a step

    def _finish(self, done: tuple[Any, Metrics, Details], micro_batches: int) -> None:
        before = self._details
        self.state, self._metrics, self._details = done
        self.global_steps += 1
        self.global_samples += micro_batches * self.step_fn.micro_size
        if before is not None:  # waits for that one only: the device has the new one to work on
            check_stuck(before.loss_scale, self.step_fn.trainable_names)
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and jax.process_index() == 0:
            self._print_progress()
        if self._home and preemption.reached():
            checkpoint.forgive()  # an earlier save that failed: this one is the last
            path = self.save_checkpoint(self._home, client_state=self.client_state).wait()
            log_dist(f"jzero: SIGTERM: saved {path}; exit code {SAVED}")
            if jax.process_count() > 1:
                jax.distributed.shutdown()  # together: process 0 serves the others until they know what it knows
            sys.exit(SAVED)

    def restart_clock(self) -> None:
        """Samples per second are counted from here."""
        self._clock = (time.perf_counter(), self.global_samples)

    def _print_progress(self) -> None:
        assert self._metrics is not None
        m = {name: float(value) for name, value in self._metrics.items()}
        now, (then, samples) = time.perf_counter(), self._clock
        speed = f", {(self.global_samples - samples) / (now - then):.1f} samples/s"
        self._clock = (now, self.global_samples)
        scale = f", loss scale {m['loss_scale']:g}" if self.config.fp16.enabled else ""
        print(
            f"step {self.global_steps}: loss {m['loss']:.4f}, lr {m['lr']:.3e}, grad norm {m['grad_norm']:.3f}{scale}, "
            f"skipped {self.skipped_steps}{speed if self.config.timers.throughput.enabled else ''}"
        )

    # ------------------------------------------------------------------ what users ask

    def train(self, mode: bool = True) -> Engine:
        """Training mode: `engine(micro_batch)` takes part in the next step."""
        self._training = mode
        return self

    def eval(self) -> Engine:
        """Evaluation mode: `engine(micro_batch)` is the loss without dropout, and nothing else."""
        return self.train(False)

    def module(self) -> Any:
        """The Flax module with the parameters as they are now, to call: `engine.module()(x)`."""
        if not hasattr(self.step_fn.model, "module"):
            raise ConfigError(f"{self.step_fn.model!r} was not made by jzero.from_flax; its parameters: state.params")
        return self.step_fn.model.module(self.state.params)

    @property
    def metrics(self) -> Metrics:
        """The last step's loss, grad_norm, lr, loss_scale, skipped, on the device; empty before the first step."""
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

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.step_fn.batch_sizes.micro

    def gradient_accumulation_steps(self) -> int:
        return self.step_fn.batch_sizes.accum

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, size: int) -> None:
        """Change the global batch by changing the accumulation; the next step compiles for it.

        A checkpoint brings the one that it was saved with, unless the config says another: call this after loading.
        """
        self._check_no_pending("set_train_batch_size")
        unit = self.step_fn.micro_size
        if size < 1 or size % unit:
            raise ConfigError(f"train_batch_size = {size}: must be a multiple of {unit} (micro-batch x replicas)")
        self.step_fn.batch_sizes = self.step_fn.batch_sizes._replace(train=size, accum=size // unit, inferred="")

    def get_lr(self) -> list[float]:
        """The learning rate of the next step, as a list of one parameter group."""
        return [float(self.step_fn.lr(self.state))]

    def get_global_grad_norm(self) -> float | None:
        """The last step's gradient norm over all parameters, before clipping; None before the first step."""
        return None if self._metrics is None else float(self._metrics["grad_norm"])

    def was_step_applied(self) -> bool:
        """Whether the last step changed the parameters."""
        return self._metrics is not None and not bool(self._metrics["skipped"])

    @property
    def skipped_steps(self) -> int:
        return int(self.state.loss_scale.skipped)

    @property
    def loss_scale(self) -> float:
        return float(self.state.loss_scale.scale)

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, save_dir: str | os.PathLike | None = None, tag: str | float | None = None,
        client_state: Mapping | None = None, save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> checkpoint.Save:  # fmt: skip
        """Save the whole state as save_dir/tag while training goes on; all processes call it.

        Args:
          save_dir: default: where the run resumed, or the config's `checkpoint.dir`.
          tag: default `global_step{N}`.
          client_state: what JSON can hold, for `load_checkpoint` to give back, and for `engine.client_state` after a
            resume. SIGTERM saves the last one.
          save_latest: name it in save_dir/latest.
          exclude_frozen_parameters: leave out the parameters that are not trained.

        Returns:
          The save under way: `.wait()` waits until it is complete. Another save, a load and the program's end wait too.

        Raises:
          ConfigError, CheckpointError: see `jzero.checkpoint.save`.
        """
        self._check_no_pending("save_checkpoint")
        former = self.client_state
        self.client_state = dict(client_state) if isinstance(client_state, Mapping) else client_state or {}
        try:
            return resuming.save(
                self, save_dir or self._home or self.config.checkpoint.dir,
                DEFAULT_TAG.format(self.global_steps) if tag is None else tag,
                latest=save_latest, without_frozen=exclude_frozen_parameters,
            )  # fmt: skip
        except ConfigError:
            self.client_state = former
            raise

    def load_checkpoint(
        self, load_dir: str | os.PathLike | None = None, tag: str | float | None = None,
        load_module_strict: bool = True, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
        load_module_only: bool = False, custom_load_fn: None = None,
    ) -> tuple[str, dict]:  # fmt: skip
        """Read a checkpoint that any layout wrote; (path, client_state). All processes call it.

        The engine's former state is given up before the new one is read, so that there is room for it.

        Args:
          load_dir: default: where the run resumed, or the config's `checkpoint.dir`.
          tag: default: the one in load_dir/latest.
          load_module_strict: False: take what fits, and keep the rest as it is.
          load_optimizer_states: False: keep the optimizer's state, but for its place in the schedule.
          load_lr_scheduler_states: False: the learning rate goes on from where it is in its schedule.
          load_module_only: take the parameters alone, no counters and no position in the data.

        Raises:
          ConfigError: no checkpoint there, or one of another model or optimizer: which leaves differ.
          CheckpointError: it is damaged.
        """
        self._check_no_pending("load_checkpoint")
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: read with jzero.checkpoint.restore and set engine.state instead")
        found = checkpoint.Checkpoint.find(load_dir or self._home or self.config.checkpoint.dir, tag)
        self._forward = None
        resuming.load(
            self, found, strict=load_module_strict, only_module=load_module_only, optimizer=load_optimizer_states,
            schedule=load_lr_scheduler_states,
        )  # fmt: skip
        self._details, self._metrics = None, None
        return str(found.path), resuming.client_state(found.notes)

    def save_16bit_model(self, save_dir: str | os.PathLike, save_filename: str = "model.safetensors") -> bool:
        """Write the parameters in half precision to save_dir/save_filename, one safetensors file; see `weights.save`.

        In float16 if the config enables fp16, else in bfloat16. Works at every stage; all processes call it.
        """
        dtype = np.dtype(np.float16) if self.config.fp16.enabled else np.dtype(jnp.bfloat16)
        weights.save(self.state.params, self.step_fn, save_dir, save_filename, dtype)
        return True

    def load_weights(self, directory: str | os.PathLike) -> None:
        """Begin anew from the parameters in a directory's safetensors, see `weights.load`: step 0, fresh optimizer."""
        self._check_no_pending("load_weights")
        if self._home and self.global_steps:
            raise ConfigError(
                f"load_weights: this run was resumed at step {self.global_steps} and would begin anew: call it only "
                "if not engine.global_steps"
            )
        params, self.state = weights.load(directory, self.step_fn), None  # makes room
        self.state = self.step_fn.init(self._rng, params, donate=True)
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._details, self._metrics, self._forward = None, None, None
        if self.training_dataloader is not None:
            self.training_dataloader.seek({"epoch": 0, "samples": 0})
        self.restart_clock()
