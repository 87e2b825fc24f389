"""Reading a checkpoint into a train state: the leaves to read, and the leaves to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jzero.checkpoint.checksums import checksums
from jzero.checkpoint.layers import read_layers
from jzero.checkpoint.other_moments import with_moments_of
from jzero.checkpoint.reader import Checkpoint
from jzero.checkpoint.restoring import match_dtypes, report_histories, stored_shapes
from jzero.distributed.place import log_dist
from jzero.errors import ConfigError, some_of
from jzero.fp8 import history
from jzero.loss_scale import Scaler
from jzero.offload import pinned_memory
from jzero.optimizers import at_step
from jzero.optimizers.compressed import ROWS, rows_of
from jzero.state import TrainState, check_alive
from jzero.stored_names import stored_names
from jzero.train_step import TrainStep
from jzero.tree import named


@dataclass(frozen=True)
class Selection:
    """The part of a checkpoint to read.

    Attributes:
      strict: the checkpoint must contain every selected leaf, in its shape, and no others. False: read what fits.
      only_module: the parameters alone, without counters or the position in the data.
      optimizer: the optimizer's state.
      schedule: the position in the learning-rate schedule.
    """

    strict: bool = True
    only_module: bool = False
    optimizer: bool = True
    schedule: bool = True

    def __contains__(self, name: str) -> bool:
        """Return whether the leaf of this name is selected."""
        if self.only_module:
            return name == "params" or name.startswith("params/")  # the parameters may be one array
        if name in ("step", "loss_scale/skipped"):
            return self.schedule
        return self.optimizer or not name.startswith("opt_state/")


@dataclass(frozen=True)
class Plan:
    """A checked read: the leaves to read, and the former state's leaves to keep.

    Checks come first and cost nothing: once they pass, the caller drops its former state, and `read` has room for the
    new one. The plan refers only to the kept leaves of the former state.

    State of single devices fits their number only, and an fp8 history its `amax_history_len` and the weights of its own
    run: of `zeros` nothing is read, and `lost` is read into nothing.
    """

    source: Checkpoint
    step: TrainStep
    selection: Selection
    taken: list[str]
    kept: dict[str, jax.Array]
    zeros: list[str]
    lost: list[str]

    def read(self) -> TrainState:
        """Read the state, sharded for the step.

        Raises:
          CheckpointError: the checkpoint is damaged.
        """
        step, shapes, shardings = self.step, named(self.step.state_shapes), named(self.step.state_shardings)
        names = stored_names(step.state_shapes, shapes)
        places = {name: shardings[name] for name in self.taken}
        stored = read_layers(self.source, places, {name: x.shape for name, x in shapes.items()}, names)
        read = match_dtypes(stored, shapes)
        zeros = {name: jnp.zeros(shapes[name].shape, shapes[name].dtype, device=shardings[name]) for name in self.zeros}
        leaves = self.kept | read | zeros
        report_histories(self.source, zeros, names)
        if self.selection.optimizer and not self.selection.only_module:
            _report_rows(self.zeros, self.lost)
        state = jax.tree.unflatten(jax.tree.structure(step.state_shapes), [leaves[name] for name in shapes])
        scale = read.get("loss_scale/scale")
        former = self.source.notes.get("loss_scale")
        if scale is not None and not _fits_scaler(step.precision.scaler, former, float(scale)):
            state = dataclasses.replace(state, loss_scale=step.new_loss_scale(state.loss_scale.skipped))
        if self.selection.optimizer != self.selection.schedule and not self.selection.only_module:
            state = _align_schedule(step, state)
        if not self.selection.strict:
            unused = sorted(self.source.shapes.keys() - {part for name in self.taken for part in names[name]})
            kept = ", ".join(self.kept) or "none"
            log_dist(f"read {len(self.taken)} leaves; kept: {kept}; not used: {', '.join(unused) or 'none'}")
        return state


def plan(source: Checkpoint, step: TrainStep, former: TrainState | None, selection: Selection) -> Plan:
    """Check a checkpoint against a step and its former state, and plan the read.

    Raises:
      ConfigError: the checkpoint belongs to another model or optimizer, or lacks leaves that `former` does not have.
    """
    pinned_memory.check(step.host_bytes, step.mesh)
    shapes = named(step.state_shapes)
    names = stored_names(step.state_shapes, shapes)
    wanted = stored_shapes({name: x for name, x in shapes.items() if name in selection}, names)
    source = with_moments_of(source, wanted)
    stored = source.shapes
    # Rows fit their number of devices only; on others they start at 0, as in DeepSpeed.
    own = dict.fromkeys((*rows_of(step.state_shapes), *(name for name in shapes if name.startswith(history.LEAVES))))
    mine = {part: name in own for name in shapes for part in names[name]}

    def is_own(stored_name: str) -> bool:  # a checkpoint has only names
        of_rows = stored_name.startswith("opt_state/") and not ROWS.isdisjoint(stored_name.split("/"))
        return mine.get(stored_name, of_rows or stored_name.startswith(history.LEAVES))

    if selection.strict:
        expected = {name: x for name, x in wanted.items() if name not in source.without and not is_own(name)}
        source.check_fit(expected, [name for name in stored if name in selection and not is_own(name)])
    fit = {name for name, shape in wanted.items() if name in stored and shape in (None, stored[name])}
    taken = [name for name in shapes if fit.issuperset(names[name])]
    if not taken:
        raise ConfigError(f"checkpoint {source.path} has nothing for this model: its leaves are {some_of(stored)}")
    zeros = [name for name in own if name not in taken]
    found = set(zeros).union(taken)
    if former is None and any(name not in found for name in shapes):
        check_alive(None)
    kept = {name: x for name, x in named(former).items() if name not in found}
    omitted = {name: x for name, x in kept.items() if source.without.keys() & set(names[name])}
    layers = {name: list(x) if len(names[name]) > 1 else [x] for name, x in omitted.items()}
    _check_kept(source, {part: x for name in omitted for part, x in zip(names[name], layers[name], strict=True)})
    read = {part for name in taken for part in names[name]}
    lost = [name for name in stored if name in selection and is_own(name) and name not in read]
    return Plan(source, step, selection, taken, kept, zeros, lost)


def _report_rows(zeros: list[str], lost: list[str]) -> None:
    """Print which state of single devices is not read."""
    fields = {part for name in (*zeros, *lost) for part in name.split("/")} & (ROWS - {"own_norm"})
    if fields:
        why = "that of other devices" if zeros and lost else "not in the checkpoint" if zeros else "not in this run"
        then = "it starts at 0" if zeros else "it is dropped"
        log_dist(f"state of single devices ({', '.join(sorted(fields))}) is {why}: {then}")


def _check_kept(source: Checkpoint, kept: dict[str, Any]) -> None:
    """Raise a ConfigError if a kept leaf differs from the leaf that was left out of the checkpoint.

    Frozen parameters have the compute dtype, which may differ between the two runs. The comparison takes place in the
    narrower dtype; a checksum in a wider one cannot be compared.
    """
    mine, unknown = {}, []
    for name in sorted(kept.keys() & source.without.keys()):
        stored = source.without[name][0]
        if stored.itemsize > kept[name].dtype.itemsize:
            unknown.append(name)
        else:
            mine[name] = kept[name].astype(stored)
    if unknown:
        log_dist(
            f"checkpoint {source.path} was saved without {some_of(unknown)}, in a wider dtype than here: not compared "
            "with the values of this engine", ranks=[0],
        )  # fmt: skip
    sums = zip(sorted(mine), checksums(mine), strict=True) if mine else ()
    if others := [name for name, checksum in sums if int(checksum) != source.without[name][1]]:
        raise ConfigError(
            f"checkpoint {source.path} was saved without {', '.join(others)}, and this engine holds other values: "
            "load them first (engine.load_weights), then call engine.load_checkpoint"
        )


def _align_schedule(step: TrainStep, state: TrainState) -> TrainState:
    """Set the counts in the optimizer's state to the state's step, if only one of the two was read."""
    align = jax.jit(
        lambda s: dataclasses.replace(s, opt_state=at_step(s.opt_state, s.step - s.loss_scale.skipped)),
        out_shardings=step.state_shardings, donate_argnums=0,
    )  # fmt: skip
    return align(state)


def scaling_of(scaler: Scaler) -> dict[str, Any]:
    """Describe how the loss is scaled; a run uses a stored loss scale only if the descriptions are equal."""
    return {"dynamic": scaler.dynamic, "static": None if scaler.dynamic else scaler.initial}


def _fits_scaler(scaler: Scaler, former: Mapping[str, Any] | None, scale: float) -> bool:
    """Return whether a stored loss scale is usable, by the checkpoint's notes or, without notes, by its value."""
    if former is not None:
        return former == scaling_of(scaler)
    return scale != 1 if scaler.dynamic else scale == scaler.initial
