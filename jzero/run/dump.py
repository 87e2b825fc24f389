"""The dump of `dump_state`: all settings, every device and every parameter, which the run report only sums up."""

from __future__ import annotations

import json

import numpy as np

from jzero.errors import escaped, mask
from jzero.planner.state_bytes import bytes_per_device
from jzero.run.report_text import align_columns, one_by_one
from jzero.step.train_step import TrainStep


def dump(step: TrainStep) -> str:
    """Describe a `TrainStep` in full, as plain text."""
    sections = {
        "config, with its defaults": _config(step),
        "mesh": _mesh(step),
        "parameters": _parameters(step),
        "settings": _settings(step),
    }
    return escaped("\n\n".join("\n".join([f"jzero state dump: {title}", *lines]) for title, lines in sections.items()))


def _config(step: TrainStep) -> list[str]:
    settings = mask("", step.config.model_dump(mode="json", warnings=False))
    return ["  " + row for row in json.dumps(settings, indent=2, ensure_ascii=False).splitlines()]


def _mesh(step: TrainStep) -> list[str]:
    axes = step.mesh.axis_names
    rows = [[*axes, "device", "process"]]
    for place, device in np.ndenumerate(step.mesh.devices):
        rows.append([*map(str, place), str(device), str(device.process_index)])
    return align_columns(rows, ">" * len(axes) + "<>")


def _parameters(step: TrainStep) -> list[str]:
    moments = bytes_per_device(step.state_shapes.opt_state, step.state_specs.opt_state, step.mesh)
    return [*one_by_one(step), f"  optimizer state: {moments:,} bytes"]


def _settings(step: TrainStep) -> list[str]:
    facts = step.setup.passes.facts
    found = {
        "step": step,
        "batch sizes": step.batch_sizes,
        "replicas": step.replicas,
        "ZeRO rule": step.setup.rule,
        "precision": step.precision,
        "parameter groups": [(group.match, group.values, len(group.leaves)) for group in step.setup.optimizer.groups],
        "optimizer": "the caller's" if step.setup.optimizer.callers else step.config.optimizer,
        "schedule": step.setup.optimizer.schedule,
        "passes": facts,
        **({"pipeline": facts.pipeline(step.batch_sizes.accum)} if facts.pipeline else {}),
        "batch sharding": step.batch_sharding,
        "compiler options": step.setup.compiler_options,
    }
    return [f"  {name}: {value if isinstance(value, str) else repr(value)}" for name, value in found.items()]
