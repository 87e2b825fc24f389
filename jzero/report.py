"""The run report: what a run is about to do, as text to read once and to paste into a chat."""

from __future__ import annotations

import io
from itertools import groupby
from math import prod
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jzero import optimizers
from jzero.accounting import state_bytes
from jzero.mesh import AXES
from jzero.zero import Leaf


def report(step: Any) -> str:
    """The run report of a `TrainStep`: mesh, batch, layout, bytes, defaults in effect, replaced keys, fallbacks."""
    out = Console(file=io.StringIO(), width=110, force_terminal=False)
    out.print(_head(step), highlight=False)
    out.print(_layout_table(step))
    out.print(_bytes_table(step))
    for title, lines in (
        ("In effect", _effective(step)),
        ("Replaced keys", [f"{r.key} = {r.value}: {r.by}" for r in step.config.replaced]),
        ("Fallbacks", _fallbacks(step)),
    ):
        if lines:
            out.print(f"{title}:", markup=False)
            for line in lines:
                out.print(f"  - {line}", markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]


def _head(step: Any) -> str:
    devices, b = step.mesh.devices, step.batch_sizes
    degrees = " x ".join(f"{axis} {step.mesh.shape[axis]}" for axis in AXES)
    device = getattr(devices.flat[0], "device_kind", devices.flat[0].platform)
    inferred = f" (inferred: {b.inferred})" if b.inferred else ""
    return (
        f"jzero: {step.model!r}\n"
        f"mesh:  {degrees} = {devices.size} x {device}\n"
        f"batch: {b.train} = {b.micro} per device x {b.accum} accumulation x {step.replicas} replicas{inferred}\n"
        f"ZeRO-{step.config.zero_optimization.stage}, {step.config.precision}: masters {step.precision.master}, "
        f"gradients accumulated in {step.precision.accum}, reduced in {step.precision.reduce}"
    )


def _layout_table(step: Any) -> Table:
    table = Table("parameters", "leaves", "elements", "spec", "note", title="Layout", title_justify="left")

    def row(leaf: Leaf) -> tuple[str, str, str]:
        return leaf.name.rsplit("/", 1)[0], str(leaf.spec), _note(leaf)

    leaves = sorted(jax.tree.leaves(step.leaves), key=lambda leaf: (row(leaf), leaf.name))
    for (name, spec, note), group in groupby(leaves, key=row):
        members = list(group)
        elements = sum(prod(leaf.shape) for leaf in members)
        label = members[0].name if len(members) == 1 else f"{name}/*"
        table.add_row(label, str(len(members)), f"{elements:,}", spec.removeprefix("Partition"), note)
    return table


def _note(leaf: Leaf) -> str:
    return ", ".join(filter(None, ["" if leaf.trainable else "frozen", f"replicated: {leaf.why}" if leaf.why else ""]))


def _bytes_table(step: Any) -> Table:
    b = state_bytes(step)
    table = Table("bytes per device", "GiB", title="Model state", title_justify="left")
    for name, value in (
        ("masters", b.masters),
        ("optimizer state", b.optimizer),
        ("= between steps", b.persistent),
        (f"parameters in {step.precision.compute}, inside the step", b.parameters),
        (f"gradients in {step.precision.compute}, inside the step", b.gradients),
        ("= all model state", b.total),
        ("  by the ZeRO formula, all leaves partitioned", b.formula),
    ):
        table.add_row(name, f"{value / 2**30:.4f}")
    return table


def _effective(step: Any) -> list[str]:
    config, schedule = step.config, step.schedule
    clip = config.gradient_clipping
    lines = [f"gradient_clipping {clip:g}: by global norm" if clip else "gradient_clipping 0: off"]
    if config.precision != "fp32" and not config.bf16.check_grad_overflow:
        lines.append("bf16.check_grad_overflow false: a gradient that is not finite reaches the parameters")
    else:
        lines.append("a step whose gradient is not finite is skipped")
    if config.fp16.enabled:
        scaler = step.precision.scaler
        lines.append(f"loss scale {'dynamic' if scaler.dynamic else 'static'}, from {scaler.initial:g}")
    if config.optimizer and not step.own_optimizer:
        lines.append(f"optimizer {config.optimizer.type} {dict(config.optimizer.params)}")
        lines += optimizers.describe(config.optimizer, schedule)
    if schedule:
        steps = (0, 1, 2, 10, 100, 1000, 10_000)
        lines.append("learning rate at step " + ", ".join(f"{n}: {float(schedule.lr(n)):.3g}" for n in steps))
        lines += schedule.notes
    if step.gradients.stacked:
        checkpointing = config.activation_checkpointing
        lines.append(
            f"layer stack: {step.gradients.length} layers, {'unrolled' if step.gradients.unrolled else 'scanned'}; "
            f"activation checkpointing {checkpointing.policy if checkpointing else 'none'}"
        )
    lines += getattr(step.model, "notes", lambda precision: [])(step.precision.compute)
    return lines


def _fallbacks(step: Any) -> list[str]:
    lines = []
    unpartitioned = [leaf for leaf in jax.tree.leaves(step.leaves) if leaf.why.startswith("no dimension")]
    lines += [f"{leaf.name} is replicated: {leaf.why}" for leaf in unpartitioned]
    if step.own_optimizer and step.config.optimizer:
        lines.append(f"optimizer section ({step.config.optimizer.type}) not used: an optimizer was passed in")
    if step.config.activation_checkpointing and not step.gradients.stacked:
        lines.append("activation_checkpointing: the model has no layer stack, so it is one checkpoint as a whole")
    return lines
