"""The engine's checkpoints: it saves, loads, resumes, and goes back to where it was."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jzero import checkpoint, weights
from jzero.checkpoint.directory import DEFAULT_TAG
from jzero.checkpoint.restoring import Selection
from jzero.data import DataLoader
from jzero.distributed.host_collectives import run_on_all
from jzero.distributed.last_words import SAVED
from jzero.distributed.place import log_dist
from jzero.errors import ConfigError
from jzero.events import SaveBegan, StateStarted
from jzero.run import restore
from jzero.run.clock import CHECKPOINT, START
from jzero.run.deepspeed_api import DeepSpeedApi
from jzero.run.diagnosis.step_checks import Checks
from jzero.run.diagnosis.watch import Mark, Taken
from jzero.run.find_checkpoint import print_warning, resume_from
from jzero.run.micro_batches import position

if TYPE_CHECKING:
    from jzero.deepspeed import Rename


def save_and_exit(save: Callable[[], checkpoint.Save]) -> NoReturn:
    """Call `save`, wait for the checkpoint and exit; all processes call it after the same step."""
    checkpoint.forgive()  # the error of an earlier save must not stop the last one
    path = save().wait()
    log_dist(f"jzero: SIGTERM: saved {path}; exit code {SAVED}")
    if jax.process_count() > 1:
        jax.distributed.shutdown()  # waits for all: if process 0 exited first, the others would see a crash
    sys.exit(SAVED)


class CheckpointedRun(DeepSpeedApi):
    """The part of the engine that replaces its state and its counters, or writes them to files."""

    training_dataloader: DataLoader | None
    client_state: dict
    global_samples: int
    micro_steps: int
    _checks: Checks
    _home: Path | None
    _rng: jax.Array

    def _tell(self) -> None:
        """Call the user's functions for what has happened."""
        raise NotImplementedError

    def save_checkpoint(
        self, save_dir: str | os.PathLike | None = None, tag: str | float | None = None,
        client_state: Mapping[str, object] | None = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
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
        if stopped := self._checks.settle():
            self._stop_for(stopped)
        state = self.live_state
        step, former, earlier = self.step_fn, self.client_state, checkpoint.last_save()
        self.client_state = dict(client_state) if isinstance(client_state, Mapping) else client_state or {}
        counters = {name: getattr(self, name) for name in restore.COUNTERS}
        frozen = [f"params/{layout.name}" for layout in jax.tree.leaves(step.layouts) if not layout.trainable]
        try:
            with self._observers.clock.part(CHECKPOINT):
                save = checkpoint.save(
                    state, save_dir or self._home or self.config.checkpoint.dir or "",
                    DEFAULT_TAG.format(self.global_steps) if tag is None else tag,
                    notes=restore.make_notes(step, self.training_dataloader, counters, self.client_state),
                    latest=save_latest, without=frozen if exclude_frozen_parameters else (),
                    max_to_keep=self.config.checkpoint.max_to_keep,
                )  # fmt: skip
        except ConfigError:
            self.client_state = former
            raise
        finally:
            begun = checkpoint.last_save()  # one that raises may have begun, too
            if begun is not None and begun is not earlier:
                self._observers.emit(SaveBegan(self.global_steps, begun))
        self._tell()
        return save

    def load_checkpoint(
        self, load_dir: str | os.PathLike | None = None, tag: str | float | None = None,
        load_module_strict: bool = True, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
        load_module_only: bool = False, custom_load_fn: None = None, rename: Rename | None = None,
    ) -> tuple[str, dict]:  # fmt: skip
        """Read a checkpoint of any layout, or one of DeepSpeed; return (path, client_state). All processes call it.

        The engine drops its former state before it reads the new one, so that both need not fit into memory.

        Args:
          load_dir: default: the directory that the run resumed from, or the config's `checkpoint.dir`.
          tag: default: the one in load_dir/latest.
          load_module_strict: False: read what fits, and keep the rest as it is.
          load_optimizer_states: False: keep the optimizer's state, except for its position in the schedule.
          load_lr_scheduler_states: False: keep the current position in the learning-rate schedule.
          load_module_only: read the parameters alone, without counters or the position in the data.
          rename: for a checkpoint of DeepSpeed, {regular expression: replacement} or a function, which turns the names
            of this model's tensors into DeepSpeed's.

        Raises:
          ConfigError: there is no checkpoint, or it belongs to another model or optimizer; the error names the leaves
            that differ.
          CheckpointError: the checkpoint is damaged.
        """
        self._accumulation.check_empty("load_checkpoint")
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: read with jzero.checkpoint.restore and set engine.state instead")
        from jzero import deepspeed  # here, since most runs never load such a checkpoint

        directory = load_dir or self._home or self.config.checkpoint.dir
        path = run_on_all("reading a checkpoint", lambda: deepspeed.find_deepspeed(directory, tag))
        if rename is not None and path is None:
            raise ConfigError(f"rename: {directory} is no checkpoint of DeepSpeed, and no other needs names")
        found = (
            checkpoint.Checkpoint.find(directory, tag)
            if path is None
            else run_on_all("import", lambda: deepspeed.DeepSpeedCheckpoint(path, self.step_fn, self._rng, rename))
        )
        self._accumulation.forward = None
        if isinstance(found, deepspeed.DeepSpeedCheckpoint) and found.weights_alone:
            log_dist(f"{found.path} {deepspeed.WEIGHTS_ALONE}")
            load_module_only = True
        self._load(
            found, Selection(load_module_strict, load_module_only, load_optimizer_states, load_lr_scheduler_states)
        )
        self._metrics = None
        self._checks.restart()
        self._tell()
        return str(found.path), restore.client_state(found.notes)

    def _load(self, source: checkpoint.Checkpoint, selection: Selection) -> None:
        """Replace the state with a checkpoint's.

        The order matters. The checks run first, so that an error leaves the engine intact. Then the engine drops its
        state, because two states may not fit into memory. Then it reads the new one.
        """
        read = restore.plan_restore(source, self.step_fn, self.state, selection)
        if not selection.only_module:
            self._take_position(source.notes)
        self.state = None
        self.state = read()
        if not selection.only_module:
            self._take_counters(source)

    def _take_position(self, notes: Mapping[str, Any]) -> None:
        """Set the global batch and the position in the data to the checkpoint's."""
        if not restore.written_by_engine(notes):
            return
        sizes, remark = restore.resumed_batch(notes, self.step_fn)
        self.step_fn.resume_batch(sizes)
        if remark:
            log_dist(remark)
        if self.training_dataloader is not None and notes["data"] is not None:
            self.training_dataloader.seek(notes["data"])

    def _take_counters(self, source: checkpoint.Checkpoint) -> None:
        """Set the counters and the user's notes to the checkpoint's; warn if the precision or the data changed."""
        notes, step = source.notes, int(self.state.step)  # the one counter in a checkpoint that no engine wrote
        counters = restore.counters(notes, step, self.gradient_accumulation_steps(), self.train_batch_size())
        self._count(counters)
        self.client_state = restore.client_state(notes)
        self.step_fn.resume_lr(restore.rate(notes, self.step_fn))
        self._started(source.path)
        other_data = restore.describe_other_data(self.training_dataloader, notes, step)
        for problem in filter(None, (restore.other_precision(notes, self.step_fn), other_data)):
            print_warning(problem)

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
        self._started(directory)
        self._tell()

    # ------------------------------------------------------------------ where the run is

    def _started(self, origin: str | os.PathLike | None = None) -> None:
        """Go on with another state; `origin` says where it is from."""
        loader, at = self.training_dataloader, self._observers.clock.lap(START)
        self._observers.emit(
            StateStarted(
                self.global_steps, self.global_samples, None if origin is None else str(origin), position(loader),
                None if loader is None else loader.order, at,
            )
        )  # fmt: skip

    def _stop_for(self, step: Taken) -> NoReturn:
        """Go back to where the run was before a step that is not finite, and raise what is found."""
        self._go_back(step.before)  # type: ignore[arg-type]  # steps that halt have marks
        error = self._checks.explain(self, step)
        self._started(f"before step {step.number}")
        raise error

    def _go_back(self, mark: Mark) -> None:
        """Set the counters and the loss scale back to where they were before steps that changed nothing else."""
        lost = self.global_steps - mark.counters["global_steps"]
        self.state = dataclasses.replace(self.state, step=self.state.step - lost, loss_scale=mark.loss_scale)
        self._count(mark.counters)
        if self.training_dataloader is not None and mark.position is not None:
            self.training_dataloader.seek(dict(mark.position))

    def _count(self, counters: Mapping[str, int]) -> None:
        self.global_steps, self.global_samples, self.micro_steps = (counters[name] for name in restore.COUNTERS)
