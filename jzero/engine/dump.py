"""The dump of `dump_state`: all settings, every device and every parameter, which the run report only sums up."""

from __future__ import annotations

import json

import jax
import numpy as np

from jzero.engine.run_report import table
from jzero.planner.state_bytes import bytes_per_device
from jzero.train_step import TrainStep
from jzero.values.masking import mask


def dump(step: TrainStep) -> str:
    """Describe a `TrainStep` in full, as plain text."""
    sections = {
        "config, with its defaults": _config(step),
        "mesh": _mesh(step),
        "parameters": _parameters(step),
        "settings": _settings(step),
    }
    return "\n\n".join("\n".join([f"jzero state dump: {title}", *lines]) for title, lines in sections.items())


def _config(step: TrainStep) -> list[str]:
    settings = mask("", step.config.model_dump(mode="json", warnings=False))
    return ["  " + row for row in json.dumps(settings, indent=2, ensure_ascii=False).splitlines()]


def _mesh(step: TrainStep) -> list[str]:
    axes = step.mesh.axis_names
    rows = [[*axes, "device", "process"]]
    for place, device in np.ndenumerate(step.mesh.devices):
        rows.append([*map(str, place), str(device), str(device.process_index)])
    return table(rows, ">" * len(axes) + "<>")


def _parameters(step: TrainStep) -> list[str]:
    """Tabulate the parameters as they are between two steps; the bytes are those of one device."""
    rows = [["parameter", "shape", "spec", "dtype", "bytes", "elements", ""]]
    for layout, x in zip(jax.tree.leaves(step.layouts), jax.tree.leaves(step.state_shapes.params), strict=True):
        n_bytes = bytes_per_device(x, layout.spec, step.mesh)
        spec = f"P({', '.join(map(repr, layout.spec))})"
        kind = "" if layout.trainable else "state" if layout.state else "frozen"
        note = ", ".join(filter(None, [kind, layout.why]))
        rows.append([layout.name, str(list(x.shape)), spec, str(x.dtype), f"{n_bytes:,}", f"{x.size:,}", note])
    total = bytes_per_device(step.state_shapes.params, step.state_specs.params, step.mesh)
    moments = bytes_per_device(step.state_shapes.opt_state, step.state_specs.opt_state, step.mesh)
    params = step.state_shapes.params
    total = bytes_per_device(params, step.state_specs.params, step.mesh)
    rows.append(["total", "", "", "", f"{total:,}", f"{sum(x.size for x in jax.tree.leaves(params)):,}", ""])
    moments = bytes_per_device(step.state_shapes.opt_state, step.state_specs.opt_state, step.mesh)
    return [*table(rows, "<<<<>><"), f"  optimizer state: {moments:,} bytes"]


def _settings(step: TrainStep) -> list[str]:
    found = {
        "step": step,
        "batch sizes": step.batch_sizes,
        "replicas": step.replicas,
        "ZeRO rule": step.setup.rule,
        "precision": step.precision,
        "parameter groups": [(group.match, group.values, len(group.leaves)) for group in step.setup.groups],
        "optimizer": "the caller's" if step.setup.callers_optimizer else step.config.optimizer,
        "schedule": step.setup.schedule,
        "passes": step.setup.passes.facts,
        "batch sharding": step.batch_sharding,
        "compiler options": step.setup.compiler_options,
    }
    return [f"  {name}: {value!r}" for name, value in found.items()]
