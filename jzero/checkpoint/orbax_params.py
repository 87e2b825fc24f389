"""Parameters to start from in an Orbax checkpoint that another program wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jzero.checkpoint.directory import NOTES, STATE, local_path
from jzero.checkpoint.layers import of_layer, stack_layers
from jzero.checkpoint.orbax_noise import silence_orbax
from jzero.checkpoint.reader import all_or_none
from jzero.distributed.host_collectives import check_same, together
from jzero.errors import ConfigError, some_of
from jzero.model import ENDS, STACK
from jzero.tree import PyTree, differences, named, path_name

TOPIC = "reading params"
TREE = "_METADATA"  # Orbax's file that describes the tree of a checkpoint
ITEMS = ("params", "default", "pytree")  # names under which Orbax stores a tree in a checkpoint's directory


def read_params(directory: str | os.PathLike, model: Any, shapes: PyTree, shardings: PyTree) -> PyTree:
    """Read the parameters of a model, each device its own part, in the dtypes of `shapes`. All processes call it.

    Args:
      directory: what `StandardCheckpointer` or `PyTreeCheckpointer` wrote, or a step of a `CheckpointManager`, whose
        item is `params` or `default`.

    Raises:
      ConfigError: no such checkpoint, or parameters of another model; the message names the leaves that are missing,
        extra or of another shape. Raised on all processes.
      CheckpointError: the checkpoint is damaged. Raised on all processes.
    """
    silence_orbax()
    check_same(TOPIC, {"params": str(directory)})
    path = together(TOPIC, lambda: _find(local_path(directory, "params")))
    handler = ocp.PyTreeCheckpointHandler()
    saved = all_or_none(TOPIC, lambda: handler.metadata(path).tree, path)
    parts = _match(path, saved, model, shapes)
    wanted = {}
    for (name, shape), sharding in zip(named(shapes).items(), jax.tree.leaves(shardings), strict=True):
        for source, one in parts[name].items():
            to = sharding if one == shape.shape else of_layer(sharding, shape.shape)
            wanted[source] = ocp.ArrayRestoreArgs(sharding=to, dtype=shape.dtype)

    def item(way: tuple, _: Any) -> Any:
        return wanted[path_name(way)].sharding if path_name(way) in wanted else ocp.PLACEHOLDER

    args = ocp.args.PyTreeRestore(
        item=jax.tree_util.tree_map_with_path(item, saved),
        restore_args=jax.tree_util.tree_map_with_path(lambda w, _: wanted.get(path_name(w), ocp.RestoreArgs()), saved),
    )
    read = named(all_or_none(TOPIC, lambda: handler.restore(path, args=args), path))

    def leaf(way: tuple, shape: Any, sharding: Any) -> jax.Array:
        layers = [read.pop(source) for source in parts[path_name(way)]]
        if layers[0].shape == shape.shape:
            return layers[0]
        return stack_layers(layers, sharding)

    return jax.tree_util.tree_map_with_path(leaf, shapes, shardings)


def _find(path: Path) -> epath.Path:
    """Find the saved tree in a directory."""
    for tree in (path, *(path / item for item in ITEMS)):
        if (tree / TREE).is_file() and not (tree.name == STATE and (tree.parent / NOTES).exists()):
            return epath.Path(tree)
    raise ConfigError(f"params = {str(path)!r}: {_why_not(path)}")


def _why_not(path: Path) -> str:
    """Explain what a directory is instead of an Orbax checkpoint, and what reads it."""
    if not path.exists():
        return "does not exist"
    tags = [tag for tag in (path, path.parent, *path.glob("*")) if (tag / NOTES).is_file() and (tag / STATE).is_dir()]
    if tags:
        call = f"engine.load_checkpoint({str(tags[0].parent)!r}, {tags[0].name!r}, load_module_only=True)"
        return f"is a jzero checkpoint: call {call}, or jzero.checkpoint.restore"
    if path.suffix == ".safetensors" or any(path.glob("*.safetensors")):
        return "contains safetensors: call engine.load_weights, or jzero.weights.load"
    steps = [step for step in path.glob("*") if any((step / item / TREE).is_file() for item in (*ITEMS, "."))]
    if steps:
        newest = max(steps, key=lambda step: step.stat().st_mtime)
        return f"contains {len(steps)} Orbax checkpoints: pass one of them, such as {str(newest)!r}"
    return (
        f"is not an Orbax checkpoint, since it has no {TREE}, {' or '.join(f'{item}/{TREE}' for item in ITEMS)}: write "
        "one with orbax.checkpoint.StandardCheckpointer().save(path, params)"
    )


def _match(path: epath.Path, saved: PyTree, model: Any, shapes: PyTree) -> dict[str, dict[str, tuple[int, ...]]]:
    """Map the name of every parameter to the saved leaves that it consists of, with their shapes: one, or its layers.

    An nnx.State and Linen's boxes add a level `value`. Whether a level of that name is one is known by what fits.
    """
    names = getattr(model, "names", None)  # of a stack that was cut out of a module without one
    layers = names.known if names else {}
    if layers and not (isinstance(saved, dict) and set(saved) == {ENDS, STACK}):
        model = model.plain
        shapes = jax.eval_shape(model.init, jax.random.key(0))
    else:
        layers = {}
    there = {name: tuple(getattr(x, "shape", None) or ()) for name, x in named(saved).items()}
    wanted = {name: tuple(x.shape) for name, x in named(shapes).items()}
    adopt = getattr(model, "adopt", _identity) if isinstance(saved, dict) else _identity
    leaves = jax.tree_util.tree_map_with_path(lambda way, _: path_name(way), saved)
    sources = [named(adopt(tree)) for tree in (leaves, _without_values(leaves))]
    found = [{name: there[leaf] for name, leaf in source.items()} for source in sources]
    problems, source = min(
        ((differences(one, wanted), source) for one, source in zip(found, sources, strict=True)),
        key=lambda x: len(x[0]),
    )
    if problems:
        raise ConfigError(
            f"params = {str(path)!r}: the checkpoint is another model's: {some_of(problems)}; it must contain the "
            "parameters and the model's state alone, without an optimizer's"
        )
    own = layers or {name: (name,) for name in wanted}
    return {name: {source[part]: wanted[part] for part in parts} for name, parts in own.items()}


def _identity(tree: PyTree) -> PyTree:
    return tree


def _without_values(tree: Any) -> Any:
    """Drop the level `value` above the leaves."""
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {"value"} and not isinstance(tree["value"], dict):
        return tree["value"]
    return {name: _without_values(part) for name, part in tree.items()}
