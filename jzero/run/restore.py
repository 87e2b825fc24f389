"""Continuing a run from a checkpoint: its notes, the leaves of the state to read, and the leaves to keep."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax

from jzero.checkpoint.checksums import checksums
from jzero.checkpoint.reader import Checkpoint
from jzero.checkpoint.restoring import CheckedRead, Selection, check_read
from jzero.config.sizes import BatchSizes, given, instead, keep_global_batch
from jzero.data.order import Position
from jzero.distributed.place import log_dist
from jzero.errors import CheckpointError, ConfigError, some_of
from jzero.layout import offload
from jzero.loss_scale import Scaler
from jzero.model import weights_layout
from jzero.optimizers import at_step
from jzero.step.state import TrainState, check_alive
from jzero.step.train_step import TrainStep
from jzero.step.update import why_no_rate
from jzero.stored_names import stored_names
from jzero.tree import named
from jzero.weights.adapters import trained_beside

COUNTERS = ("global_steps", "global_samples", "micro_steps")


def make_notes(step: TrainStep, loader: Any, counters: Mapping[str, int], client: Mapping[str, Any]) -> dict[str, Any]:
    """Make the notes that a checkpoint contains besides the state.

    Args:
      loader: the DataLoader of the training data, or None.
      counters: {name: count} of COUNTERS.
      client: the user's own notes.
    """
    sizes, table = step.batch_sizes, weights_layout(step.model)
    return {
        "engine": dict(counters),
        "batch": {"train": sizes.train, "micro": sizes.micro, "replicas": step.replicas, "given": given(step.config)},
        "precision": step.config.precision,
        "loss_scale": scaling_of(step.precision.scaler),
        "lr": step.rate,
        "data": getattr(loader, "position", None),
        "order": getattr(loader, "order", None),
        "seen": getattr(loader, "seen", None),
        "client": client,
        "weights": table,  # for jzero export, as is the next
        "trained_beside_adapters": trained_beside(table, step.layouts),
    }


def wrong_notes(notes: Mapping[str, Any]) -> str:
    """Name the parts of an engine's notes with values of other types; "" if there are none, or no engine wrote them."""
    if not written_by_engine(notes):
        return ""

    def are_counts(x: Any, names: Iterable[str], least: int) -> bool:
        return isinstance(x, dict) and all(type(x.get(n)) is int and least <= x[n] < 2**63 for n in names)

    def is_position(x: Any) -> bool:
        with contextlib.suppress(ConfigError):
            return bool(Position.from_json(x))
        return False

    data, order, lr = notes.get("data"), notes.get("order"), notes.get("lr")
    fine = {
        "engine": are_counts(notes["engine"], COUNTERS, 0),
        "batch": are_counts(notes.get("batch"), ("train", "micro", "replicas"), 1),
        "data": data is None or is_position(data),
        "order": order is None or isinstance(order, dict),
        "lr": lr is None or (isinstance(lr, int | float) and abs(lr) < 1e300),
        "client": isinstance(notes.get("client"), dict),
    }
    return ", ".join(name for name, is_fine in fine.items() if not is_fine)


def written_by_engine(notes: Mapping[str, Any]) -> bool:
    """Return whether an engine wrote the notes; other callers of `checkpoint.save` may pass any notes."""
    return "engine" in notes


def client_state(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's own notes; {} if no engine wrote the checkpoint."""
    return notes["client"] if written_by_engine(notes) else {}


def counters(notes: Mapping[str, Any], step: int, accum: int, train: int) -> dict[str, int]:
    """Return {name: count} of COUNTERS; compute them from the step if no engine wrote the checkpoint."""
    if written_by_engine(notes):
        return {name: notes["engine"][name] for name in COUNTERS}
    return dict(zip(COUNTERS, (step, step * train, step * accum), strict=True))


def resumed_batch(notes: Mapping[str, Any], step: TrainStep) -> tuple[BatchSizes, str]:
    """Return the sizes to resume with (the checkpoint's unless the config names another batch), and a line to log."""
    then, now = notes["batch"], step.batch_sizes
    train = then["train"]
    sizes = now if train == now.train else keep_global_batch(step.config, step.replicas, then, step.config.autos)
    if sizes is None:
        return now, f"the checkpoint's train_batch_size was {train}; from here on it is {now.train}"
    if sizes is now and then["replicas"] == step.replicas:
        return now, ""
    own = instead(step.config.gradient_accumulation_steps, sizes.accum)
    return sizes, f"train_batch_size {train} as in the checkpoint: {sizes.accum} micro-batches{own}"


def rate(notes: Mapping[str, Any], step: TrainStep) -> float | None:
    """Return the rate of `set_lr` to resume with; None if there was none, or now a schedule decides."""
    then = notes.get("lr")
    return None if then is None or why_no_rate(step.setup, then) else then


def other_precision(notes: Mapping[str, Any], step: TrainStep) -> str:
    """Describe how the compute dtype differs from the checkpoint's; "" if it does not, or the notes have none."""
    then, now = notes.get("precision"), step.config.precision
    if then in (None, now):
        return ""
    why = f" ({step.precision.why})" if step.precision.why else ""
    return f"the checkpoint's run computed in {then}, and this one computes in {now}{why}"


def describe_other_data(loader: Any, notes: Mapping[str, Any], step: int) -> str:
    """Describe how the data differ from the data of an uninterrupted run; "" if they do not."""
    position, order = notes.get("data"), notes.get("order") or {}
    if loader is None:
        lost = any((position or {}).values())
        return "the checkpoint has a position in training_data, but this run has no training_data" if lost else ""
    if position is None:
        start = f"the checkpoint is of step {step} but has no position in training_data, which begins at its start"
        return start if step else ""
    others = [f"{name} was {order[name]}, is {x}" for name, x in loader.order.items() if order.get(name, x) != x]
    head = "other data than the checkpoint's, or in another order from here on: "
    return head + ", ".join(others) if others else ""


# ------------------------------------------------------------------ the state


def plan_restore(
    source: Checkpoint, step: TrainStep, former: TrainState | None, selection: Selection
) -> Callable[[], TrainState]:
    """Check a checkpoint against a step and its former state, and return the call that reads the new state.

    The checks cost nothing: once they pass, the caller drops its former state, so that the read has room. What is
    returned refers only to the leaves of the former state that are kept.

    Raises:
      ConfigError: the checkpoint belongs to another model or optimizer, or lacks leaves that `former` does not have.
      CheckpointError: an engine cannot continue from its notes.
    """
    if wrong := wrong_notes(source.notes):
        raise CheckpointError(f"checkpoint {source.path} is damaged: its notes on {wrong} are not an engine's")
    offload.check_pinned(step.host_bytes, step.mesh)
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
