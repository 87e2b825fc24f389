"""Trees of arrays in Orbax's format: a checkpoint's own, and parameters in those that other programs wrote."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from etils import epath
from flax.traverse_util import unflatten_dict
from jax.sharding import Sharding

from jzero.checkpoint.directory import NOTES, STATE, local_path
from jzero.checkpoint.snapshot import layer_sharding
from jzero.distributed.host_collectives import check_same, read_on_all, run_on_all
from jzero.errors import ConfigError, some_of
from jzero.model import ENDS, STACK
from jzero.tree import PyTree, differences, named, path_name

if TYPE_CHECKING:
    from orbax.checkpoint import ArrayRestoreArgs

T = TypeVar("T")
ORBAX_FILE = "orbax/checkpoint/"
NAMES = re.compile("orbax|tensorstore|OCDBT")  # the last one: TensorStore's own futures have no traceback
TOPIC = "reading params"
TREE = "_METADATA"  # Orbax's file that describes the tree of a checkpoint
ITEMS = ("params", "default", "pytree")  # names under which Orbax stores a tree in a checkpoint's directory


@functools.cache
def import_orbax() -> ModuleType:
    """Import `orbax.checkpoint`, and drop the tracebacks that follow a failed read or write from now on.

    It takes 0.3 s, which a script that neither saves nor loads does not spend. The script's own thread imports it:
    Python's threading accepts no functions to call at its end from a thread that outlives the script.

    Orbax closes its event loop at the first error. Every other file operation in flight then fails with "Event loop is
    closed", and Python reports each abandoned task and coroutine: hundreds of tracebacks for one damaged file. When a
    save fails, every thread of Orbax logs a traceback, over 100 lines, before the caller gets the same exception.
    """
    import orbax.checkpoint as ocp

    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        late = type(error) is RuntimeError and str(error) == "Event loop is closed"
        abandoned = type(error) is Exception and isinstance(error.__cause__, GeneratorExit)
        if not late and not abandoned:
            before(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and ORBAX_FILE in record.pathname))
    logging.getLogger("asyncio").addFilter(lambda record: not _is_of_orbax(record))
    return ocp


def _is_of_orbax(record: logging.LogRecord) -> bool:
    """Return whether asyncio reports a task or a future of Orbax: by its text, or where its exception comes from."""
    trace = record.exc_info[2] if record.exc_info else None
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return bool(NAMES.search(record.getMessage())) or any(ORBAX_FILE in file for file in files)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nest named leaves ("a/b") as dicts, the form in which Orbax stores them."""
    return unflatten_dict(dict(leaves), sep="/")


def read_arrays(path: Path, saved: PyTree, wanted: Mapping[str, ArrayRestoreArgs]) -> dict[str, jax.Array]:
    """Read the leaves of these names, each device its own part.

    Args:
      saved: the tree on the disk, with any leaves.
      wanted: by name.
    """
    ocp = import_orbax()

    def pick(way: tuple, _: Any) -> Any:
        return wanted[path_name(way)].sharding if path_name(way) in wanted else ocp.PLACEHOLDER

    item = jax.tree_util.tree_map_with_path(pick, saved)
    each = jax.tree_util.tree_map_with_path(lambda way, _: wanted.get(path_name(way), ocp.RestoreArgs()), saved)
    read = named(ocp.PyTreeCheckpointHandler().restore(epath.Path(path), args=ocp.args.PyTreeRestore(item, each)))
    return {name: read[name] for name in wanted}


def stack_layers(layers: Sequence[jax.Array], sharding: Sharding) -> jax.Array:
    return jax.jit(jnp.stack, out_shardings=sharding)(layers)


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
    ocp = import_orbax()
    check_same(TOPIC, {"params": str(directory)})
    path = run_on_all(TOPIC, lambda: _find(local_path(directory, "params")))
    saved = read_on_all(TOPIC, lambda: ocp.PyTreeCheckpointHandler().metadata(path).tree, path)
    parts = _match(path, saved, model, shapes)
    wanted = {}
    for (name, shape), sharding in zip(named(shapes).items(), jax.tree.leaves(shardings), strict=True):
        for source, one in parts[name].items():
            to = sharding if one == shape.shape else layer_sharding(sharding, shape.shape)
            wanted[source] = ocp.ArrayRestoreArgs(sharding=to, dtype=shape.dtype)
    read = read_on_all(TOPIC, lambda: read_arrays(path, saved, wanted), path)

    def leaf(way: tuple, shape: Any, sharding: Any) -> jax.Array:
        layers = [read.pop(source) for source in parts[path_name(way)]]
        return layers[0] if layers[0].shape == shape.shape else stack_layers(layers, sharding)

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
    adopt = getattr(model, "adopt", None) if isinstance(saved, dict) else None
    leaves = jax.tree_util.tree_map_with_path(lambda way, _: path_name(way), saved)
    sources = [named(adopt(tree) if adopt else tree) for tree in (leaves, _without_values(leaves))]
    found = [(differences({n: there[leaf] for n, leaf in source.items()}, wanted), source) for source in sources]
    problems, source = min(found, key=lambda x: len(x[0]))
    if problems:
        raise ConfigError(
            f"params = {str(path)!r}: the checkpoint is another model's: {some_of(problems)}; it must contain the "
            "parameters and the model's state alone, without an optimizer's"
        )
    own = layers or {name: (name,) for name in wanted}
    return {name: {source[part]: wanted[part] for part in parts} for name, parts in own.items()}


def _without_values(tree: Any) -> Any:
    """Drop the level `value` above the leaves."""
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {"value"} and not isinstance(tree["value"], dict):
        return tree["value"]
    return {name: _without_values(part) for name, part in tree.items()}
