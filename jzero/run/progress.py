"""A run's progress: the notes on it in a checkpoint, and how a resumed run continues from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from jzero.checkpoint.reader import Checkpoint
from jzero.config.sizes import BatchSizes, given, keep_global_batch
from jzero.data.order import Position
from jzero.errors import CheckpointError, ConfigError
from jzero.model import weights_layout
from jzero.run.restore import scaling_of
from jzero.step.train_step import TrainStep
from jzero.step.update import why_no_rate
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
        "batch": {
            "train": sizes.train,
            "micro": sizes.micro,
            "replicas": step.replicas,
            "given": given(step.config),
        },
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


def check_notes(source: Checkpoint) -> None:
    """Raise a CheckpointError if an engine cannot continue from a checkpoint's notes."""
    if wrong := wrong_notes(source.notes):
        raise CheckpointError(f"checkpoint {source.path} is damaged: its notes on {wrong} are not an engine's")


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
    return sizes, f"train_batch_size {train} as in the checkpoint: {sizes.accum} micro-batches"


def rate(notes: Mapping[str, Any], step: TrainStep) -> float | None:
    """Return the rate of `set_lr` to resume with; None if there was none, or now a schedule decides."""
    then = notes.get("lr")
    return None if then is None or why_no_rate(step.setup, then) else then


def resume_differences(loader: Any, notes: Mapping[str, Any], step: TrainStep, number: int) -> list[str]:
    """List what differs from an uninterrupted run: the precision, the data; `number` is that of the step."""
    return [
        problem for problem in (other_precision(notes, step), describe_other_data(loader, notes, number)) if problem
    ]


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
