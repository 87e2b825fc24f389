"""Reading a checkpoint into a train state: the leaves to read, and the leaves to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from jzero.checkpoint.checksums import checksums
from jzero.checkpoint.reader import Checkpoint
from jzero.checkpoint.restoring import CheckedRead, Selection, check_read
from jzero.distributed.place import log_dist
from jzero.errors import ConfigError, some_of
from jzero.layout import pinned_memory
from jzero.loss_scale import Scaler
from jzero.optimizers import at_step
from jzero.step.state import TrainState, check_alive
from jzero.step.train_step import TrainStep
from jzero.stored_names import stored_names
from jzero.tree import named


def plan_restore(
    source: Checkpoint, step: TrainStep, former: TrainState | None, selection: Selection
) -> Callable[[], TrainState]:
    """Check a checkpoint against a step and its former state, and return the call that reads the new state.

    The checks cost nothing: once they pass, the caller drops its former state, so that the read has room. What is
    returned refers only to the leaves of the former state that are kept.

    Raises:
      ConfigError: the checkpoint belongs to another model or optimizer, or lacks leaves that `former` does not have.
    """
    pinned_memory.check_pinnable(step.host_bytes, step.mesh)
    shapes, shardings = named(step.state_shapes), named(step.state_shardings)
    names = stored_names(step.state_shapes, shapes)
    checked = check_read(source, shapes, shardings, names, selection=selection, kept=source.without)
    if not checked.taken:
        raise ConfigError(
            f"checkpoint {source.path} has nothing for this model: its leaves are {some_of(checked.source.shapes)}"
        )
    found = {*checked.taken, *checked.zeros}
    if former is None and shapes.keys() - found:
        check_alive(None)
    kept = {name: x for name, x in named(former).items() if name not in found}
    omitted = {
        part: layer
        for name, x in kept.items()
        if source.without.keys() & set(names[name])
        for part, layer in zip(names[name], x if len(names[name]) > 1 else [x], strict=True)
    }
    _check_kept(source, omitted)
    return partial(_read, checked, step, selection, kept)


def _read(checked: CheckedRead, step: TrainStep, selection: Selection, kept: dict[str, jax.Array]) -> TrainState:
    """Read the state, sharded for the step.

    Raises:
      CheckpointError: the checkpoint is damaged.
    """
    source, names, read = checked.source, checked.names, checked.read()
    leaves = kept | read
    state = jax.tree.unflatten(jax.tree.structure(step.state_shapes), [leaves[name] for name in names])
    scale = read.get("loss_scale/scale")
    if scale is not None and not _fits_scaler(step.precision.scaler, source.notes.get("loss_scale"), float(scale)):
        state = dataclasses.replace(state, loss_scale=step.new_loss_scale(state.loss_scale.skipped))
    if selection.optimizer != selection.schedule and not selection.only_module:
        state = _align_schedule(step, state)
    if not selection.strict:
        unused = ", ".join(sorted(source.shapes.keys() - {part for name in checked.taken for part in names[name]}))
        log_dist(f"read {len(checked.taken)} leaves; kept: {', '.join(kept) or 'none'}; not used: {unused or 'none'}")
    return state


def _check_kept(source: Checkpoint, kept: dict[str, jax.Array]) -> None:
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
