"""Loads safetensors files directly into sharded arrays; every process reads only its own slices."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.distributed.host_collectives import together
from jzero.errors import ConfigError, some_of
from jzero.model import weights_layout
from jzero.tree import PyTree, differences, path_name
from jzero.weights.name_map import ShapeDtype, Tensor, assign, dotted, leaves_of, tensors
from jzero.weights.safetensors import File

if TYPE_CHECKING:
    from jzero.train_step import TrainStep

TORCH = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load(directory: str | os.PathLike, step: TrainStep) -> PyTree:
    """Load the parameters of a model from safetensors files, with the sharding and dtype of the step's master weights.

    The tensors have the names of the model's `weights_layout`, as `transformers` writes them, or the names of the
    leaves, as `jzero export` writes them for a model without one. Host memory: one leaf's local part at a time, besides
    the result.

    Args:
      directory: with model.safetensors, model.safetensors.index.json or any *.safetensors; or a .safetensors file.
      step: a `TrainStep` of any mesh and stage.

    Returns:
      Parameters for `step.init(rng, params)`.

    Raises:
      ConfigError: no such files, truncated files, or files of another model; the message names the tensors that are
        missing, extra or of another shape, and differences in config.json. Raised on all processes.

    >>> state = step.init(jax.random.key(0), load("Llama-2-7b-hf", step), donate=True)  # doctest: +SKIP
    """
    shapes, shardings = step.state_shapes.params, step.state_shardings.params
    of_leaf = together("load_weights", lambda: _find(Path(directory), leaves_of(shapes), weights_layout(step.model)))

    def read(path: tuple, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        parts = of_leaf[dotted(path_name(path))]
        known: dict[str, np.ndarray] = {}  # replicas of a slice are read only once

        def part(index: Any) -> np.ndarray:
            if str(index) not in known:
                known[str(index)] = _read(parts, index, shape)
            return known[str(index)]

        array = jax.make_array_from_callback(shape.shape, sharding, part)
        return array.block_until_ready()  # frees the host copies before the next leaf is read

    return jax.tree_util.tree_map_with_path(read, shapes, shardings)


def _read(parts: list[tuple[File, Tensor]], index: tuple[slice, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Read a slice of a leaf, in the leaf's dtype."""
    box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, leaf.shape, strict=True))
    values = np.zeros([s.stop - s.start for s in box], leaf.dtype)  # padding stays zero
    for file, tensor in parts:
        if (both := tensor.overlap(box)) is None:
            continue
        own, inner = both
        target = tensor.oriented(values[inner])
        for part, view in file.windows(tensor.name, own):
            assign(target[part], view)
    return values


def _find(path: Path, leaves: Mapping[str, ShapeDtype], table: dict | None) -> dict[str, list[tuple[File, Tensor]]]:
    """Map every leaf to the (file, tensor) pairs that contain its parts.

    Raises:
      ConfigError: the files do not fit the model.
    """
    files = [File.open(file) for file in _files(path)]
    count = sum(len(file.entries) for file in files)
    for old, new in (table or {}).get("aliases", {}).items():
        for file in files:
            file.entries = {re.sub(old, new, name): entry for name, entry in file.entries.items()}
    where = {name: file for file in files for name in file.entries}
    if len(where) != count:
        raise ConfigError(f"{path}: some tensors are in two of {some_of(file.path.name for file in files)}")
    wanted = tensors(leaves, table)
    if len(where.keys() & leaves.keys()) > sum(tensor.name in where for tensor in wanted):
        table, wanted = None, tensors(leaves, None)  # the files use the names of the leaves
    ignored = table.get("ignored", ()) if table else ()
    where = {name: file for name, file in where.items() if not any(fnmatchcase(name, pattern) for pattern in ignored)}
    problems = _config_differences(path.parent if path.is_file() else path, table) + _misfits(where, wanted)
    if problems:
        advice = f"; {table['advice']}" if table and "advice" in table else ""
        raise ConfigError(f"{path} belongs to another model: {some_of(problems)}{advice}")
    of_leaf: dict[str, list[tuple[File, Tensor]]] = {}
    for tensor in wanted:
        where[tensor.name].reshape(tensor.name, tensor.view)
        of_leaf.setdefault(tensor.leaf, []).append((where[tensor.name], tensor))
    return of_leaf


def _files(path: Path) -> list[Path]:
    """List the safetensors files of `path`, chosen in the order that transformers uses."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory or .safetensors file")
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if (index := path / "model.safetensors.index.json").is_file():
        return _indexed(index)
    if found := sorted(path.glob("*.safetensors")):
        return found
    if torch := sorted(file.name for pattern in TORCH for file in path.glob(pattern)):
        raise ConfigError(
            f"{path} contains {some_of(torch)}, which jzero does not read: convert it to safetensors first, with "
            "transformers: AutoModelForCausalLM.from_pretrained(this).save_pretrained(other)"
        )
    raise ConfigError(f"{path} contains no *.safetensors: pass the directory of an export or a download")


def _indexed(index: Path) -> list[Path]:
    """List the files of an index, which must lie beside it: a downloaded index must not choose other files to read."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        for name in names:
            if Path(name).name != name or name in ("", "..") or len(name) > 255 or not name.isprintable():
                raise ValueError(f"{ascii(name)[:80]} is not the name of a file beside it")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from None
    return [index.with_name(name) for name in names]


def _config_differences(directory: Path, table: dict | None) -> list[str]:
    """List the entries of a config.json beside the files that contradict the model."""
    if table is None or not (directory / "config.json").is_file():
        return []
    try:
        there = {**table.get("absent", {}), **_flattened(json.loads((directory / "config.json").read_text()))}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{directory / 'config.json'} is not a JSON object: {error}") from None
    here = _flattened(table["config"])
    same = here.keys() - set(table.get("may_differ", ()))
    return [
        f"config.json has {key} = {json.dumps(there[key])}, not {json.dumps(here[key])}"
        for key in sorted(same & there.keys())
        if there[key] != here[key]
    ]


def _flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Add the entries of nested dictionaries, which transformers versions nest differently, to the top level."""
    inside = {key: value for part in config.values() if isinstance(part, dict) for key, value in part.items()}
    return {**inside, **config}


def _misfits(where: Mapping[str, File], wanted: list[Tensor]) -> list[str]:
    """List tensors that are missing, extra, of another shape, or of a dtype that is not cast (only wide floats are)."""
    expected = {t.name: t for t in wanted}
    found = {name: file.entries[name] for name, file in where.items()}
    problems = differences({n: shape for n, (_, shape, _) in found.items()}, {n: t.shape for n, t in expected.items()})
    for name, tensor in expected.items():
        dtype = found[name][0] if name in found else tensor.dtype
        floats = [jnp.issubdtype(x, jnp.floating) and x.itemsize > 1 for x in (dtype, tensor.dtype)]
        if dtype != tensor.dtype and not all(floats):
            problems.append(f"{name} is {dtype}, not {tensor.dtype}")
    return problems
