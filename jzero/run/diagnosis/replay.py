"""Saves what a step that is not finite ran on, and repeats it on one device.

A directory contains the parameters, the micro-batch, what went with it and the key, as a checkpoint: it reads on any
machine. The model is Python code, so whoever replays passes it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, default_registry

from jzero import checkpoint
from jzero.errors import CheckpointError, ConfigError, escaped, in_a_line, some_of
from jzero.kernels.fp8 import delayed_scaling
from jzero.mesh import make_mesh
from jzero.run.diagnosis.non_finite_search import Finding, find_non_finite
from jzero.run.diagnosis.repeat import Repeat
from jzero.step.programs import StepInput
from jzero.step.setup import Setup
from jzero.step.state import TrainState
from jzero.step.train_step import make_train_step
from jzero.tree import PyTree, differences, named

# The keys of a config that decide which numbers a forward and a backward pass compute.
NUMERIC = (
    "fp16", "bf16", "data_types", "communication_data_type", "trainable_parameters", "frozen_parameters",
    "stack",
)  # fmt: skip

README = """# Step {step}, which was not finite

{found}

Repeat its micro-batch {micro_batch} on one device, a CPU too:

    JAX_PLATFORMS=cpu {command}

`function()` returns the model that the run was trained with. From Python: `jzero.replay({path!r}, model)`.
"""


def save_replay(output_path: str, repeat: Repeat, found: Finding, samples: Any) -> str:
    """Save what a replay needs as output_path/step{N}, and describe it in a line. All processes call it."""
    state, fed = repeat.state, repeat.fed
    numbers = repeat.numbers(found.micro_batch)
    notes = {
        "step": found.step, "loss": repr(found.loss), "micro_batch": found.micro_batch, "of": found.of,
        "replica": found.replicas[0] if found.replicas else 0, "replicas": repeat.replicas, "micro": repeat.micro,
        "numbers": numbers, "samples": [] if samples is None else [int(samples[n]) for n in numbers],
        "config": repeat.setup.config.model_dump(mode="json", include=set(NUMERIC), exclude_unset=True),
    }  # fmt: skip
    try:
        batch, extra = _plain(repeat.micro_batch(found.micro_batch), "the batch"), _plain(fed.extra, "extra")
        notes["structures"] = {"batch": _structure(batch), "extra": _structure(extra)}
        tree = {
            "params": state.params, "batch": jax.tree.leaves(batch), "extra": jax.tree.leaves(extra),
            "key": jax.random.fold_in(state.rng, state.step), "scale": state.loss_scale.scale, "fp8": state.fp8,
        }  # fmt: skip
        path = checkpoint.save(tree, output_path, f"step{found.step}", notes=notes, latest=False).wait()
        if jax.process_index() == 0:
            text = README.format(
                step=found.step, found=found, micro_batch=found.micro_batch, path=str(path), command=_command(path)
            )
            (path / "README.md").write_text(text)
    except (CheckpointError, ConfigError, OSError) as error:
        return f"nothing is saved for a replay: {in_a_line(error)}"
    return f"to repeat it on one device: {_command(path)}"


def _command(path: Path) -> str:
    return shlex.join(["jzero", "replay", str(path), "--model", "package.module:function"])


def replay(directory: str | os.PathLike, model: Any) -> Finding:
    """Repeat a step that was not finite on one device: its first micro-batch that failed, on the replica that failed.

    If that is finite, the rows of all replicas are repeated as one micro-batch.

    Args:
      directory: `non_finite.output_path`/step{N} of the run's config.
      model: the run's, as for `initialize`.

    Returns:
      What was found; print it.

    Raises:
      ConfigError: the directory has no such step, or it belongs to another model.
    """
    path = Path(directory)
    source = checkpoint.Checkpoint.find(path.parent, path.name)
    notes = source.notes
    if "micro_batch" not in notes:
        raise ConfigError(f"{directory}: this is a checkpoint, not a saved step; pass non_finite.output_path/step...")
    if "structures" not in notes:
        raise ConfigError(f"{directory}: another version of jzero saved this step; let the run save it again")
    mesh = make_mesh(devices=jax.local_devices()[:1])
    shapes = jax.eval_shape(_setup(model, notes, mesh, notes["micro"]).model.init, jax.random.key(0))
    ours = {f"params/{name}": tuple(x.shape) for name, x in named(shapes).items()}
    theirs = {name: shape for name, shape in source.shapes.items() if name.startswith("params")}
    if problems := differences(theirs, ours):
        raise ConfigError(f"{directory} belongs to another model: {some_of(problems)}")
    leaves = source.read(dict.fromkeys(source.shapes, NamedSharding(mesh, PartitionSpec())))
    params = jax.tree.unflatten(jax.tree.structure(shapes), [leaves[name] for name in ours])
    found = _repeat(model, notes, mesh, leaves, params, alone=True)
    if found.direction or notes["replicas"] == 1:
        return found
    return _repeat(model, notes, mesh, leaves, params, alone=False)  # rows of several replicas may fail together


def _setup(model: Any, notes: dict[str, Any], mesh: Mesh, rows: int) -> Setup:
    config = {**notes["config"], "train_batch_size": rows, "gradient_accumulation_steps": 1}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}  # never runs
    return make_train_step(model, config, mesh=mesh).setup


def _repeat(
    model: Any, notes: dict[str, Any], mesh: Mesh, leaves: dict[str, jax.Array], params: PyTree, alone: bool
) -> Finding:
    """Search the part of the replica that failed, or, not `alone`, those of all replicas as one micro-batch."""
    replica, micro, replicas = notes["replica"], notes["micro"], notes["replicas"]
    rows = slice(replica * micro, (replica + 1) * micro) if alone else slice(0, replicas * micro)
    setup = _setup(model, notes, mesh, rows.stop - rows.start)
    batch = jax.tree.map(lambda x: x[rows], _rebuild(notes["structures"]["batch"], "batch", leaves))
    key = leaves["key"] if replicas == 1 else jax.random.fold_in(leaves["key"], replica)
    scale = leaves["scale"] / notes["of"] / (replicas if alone else 1)  # of the mean over the replicas
    scaling = replace(setup.precision.scaler.init(1), scale=scale)
    histories = {name: leaves[f"{delayed_scaling.LEAVES}{name}"] for name in setup.histories}
    state = TrainState(jnp.zeros((), jnp.int32), params, (), scaling, key, histories)
    fed = StepInput((batch,), _rebuild(notes["structures"]["extra"], "extra", leaves))
    found = Finding(notes["step"], float(notes["loss"]), of=notes["of"])
    found = find_non_finite(Repeat(setup, state, fed, key), found, first=notes["micro_batch"])
    numbers = {"rows": notes["numbers"][rows], "samples": notes["samples"][rows]}
    return replace(found, replicas=(replica,) if found.direction and alone else ()).located(**numbers)


def main(directory: str, model: str) -> int:
    """Replay a directory with the model that `package.module:function` returns; 0 if something was found."""
    import importlib
    import sys

    module, _, function = model.partition(":")
    if not module or not function:
        raise ConfigError(f"--model {model}: must be package.module:function, a function that returns the model")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {model}: {in_a_line(error)}") from None
    found = replay(directory, make())
    print(escaped(found))
    return 0 if found.direction or found.parameters else 1


def _plain(node: PyTree, name: str) -> PyTree:
    """Turn the mappings of a tree, as an OrderedDict, into dicts: JAX writes the structure of no others.

    Raises:
      ConfigError: a container that is no mapping with text as keys, list or tuple.
    """
    if isinstance(node, Mapping) and all(isinstance(key, str) for key in node):
        return {key: _plain(child, name) for key, child in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_plain(child, name) for child in node)
    if node is None or jax.tree_util.all_leaves([node]):
        return node
    raise ConfigError(
        f"{name} contains a {type(node).__name__}; a replay takes dicts with text as keys, lists and tuples"
    )


def _structure(tree: PyTree) -> str:
    """Write a tree's containers as text."""
    return jax.tree.structure(tree).serialize_using_proto().hex()  # type: ignore[attr-defined]  # not in its stubs


def _rebuild(structure: str, name: str, leaves: dict[str, jax.Array]) -> PyTree:
    """Build the tree of such a text with the leaves `name`/0, `name`/1, ..."""
    tree = PyTreeDef.deserialize_using_proto(default_registry, bytes.fromhex(structure))
    return tree.unflatten([leaves[f"{name}/{i}"] for i in range(tree.num_leaves)])
