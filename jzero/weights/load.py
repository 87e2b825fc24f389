"""Loads safetensors files directly into sharded arrays; every process reads only its own slices."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jzero.display.slow_work import slow_work
from jzero.distributed.host_collectives import run_on_all
from jzero.errors import ConfigError, no_such_directory, some_of
from jzero.model import weights_layout
from jzero.tree import PyTree, differences, path_name
from jzero.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, trained
from jzero.weights.fp8_blocks import unpacked_fp8
from jzero.weights.leaf_reader import FileChecksums, read_leaf
from jzero.weights.mxfp4 import unpacked
from jzero.weights.name_map import ShapeDtype, Table, Tensor, adapter_leaves, by_tensor, dotted, leaves_of, tensors
from jzero.weights.safetensors import File

if TYPE_CHECKING:
    from jzero.step.train_step import TrainStep

TORCH = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@slow_work("loading the weights")
def load(
    directory: str | os.PathLike, step: TrainStep, *, params: PyTree = None, rename: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
) -> PyTree:  # fmt: skip
    """Load the parameters of a model from safetensors files, with the sharding and dtype of the step's master weights.

    The tensors have the names of the model's `weights_layout`, as `transformers` writes them, or the names of the
    leaves, as `jzero export` writes them for a model without one. Host memory besides the result: two pieces of 128 MiB
    and a window of 32 MiB of a file; of parameters in host memory, one leaf's local part.

    Files may lack the adapters that `weights_layout` declares, and the parameters that `missing` names. Files of `peft`
    contain adapters alone.

    Args:
      directory: of *.safetensors, one such file, or the name of a model in the Hugging Face Hub's local cache.
      step: a `TrainStep` of any mesh and stage.
      params: the values of parameters that the files lack, sharded as the step's; default: None in their places, which
        `step.init` fills.
      rename: {regular expression: replacement}, applied to the names of the model's parameters before they are looked
        up: {"base_module/": ""} for a module that was wrapped after the files were written.
      missing: regular expressions; parameters whose name matches one may be missing.

    Returns:
      Parameters for `step.init(rng, params)`.

    Raises:
      ConfigError: no such files, truncated files, values that do not match the checksums that jzero writes, or files of
        another model; the message names the tensors that are missing, extra or of another shape, and differences in
        config.json. Files without adapters for `params` whose adapters are not zero: the files may be merged. Raised
        on all processes.

    >>> state = step.init(jax.random.key(0), load("Llama-2-7b-hf", step), donate=True)  # doctest: +SKIP
    """
    shapes, shardings = step.state_shapes.params, step.state_shardings.params
    own = file_names(step)
    in_files = names_in_files([*own.values()], rename or {})
    names = {name: in_files[other] for name, other in own.items()}
    optional = {in_files[name] for name in matched([*own.values()], missing)}
    leaves = dict(zip(names.values(), leaves_of(shapes).values(), strict=True))
    table = weights_layout(step.model)
    of_leaf = run_on_all("load_weights", lambda: _find(Path(directory), leaves, table, optional, params is not None))
    if params is not None:
        values = dict(zip(leaves, jax.tree.leaves(params, is_leaf=lambda x: x is None), strict=True))
        if twice := sorted(trained(table, values) - of_leaf.keys() - optional):
            raise ConfigError(
                f"load_weights: {os.fspath(directory)} lacks the adapters, and the engine's {some_of(twice)} are not "
                "zero: they would count twice if these weights are merged with them. Load weights into a new engine, "
                'before its adapters; if these are not merged, keep the adapters with missing=["lora_"]'
            )

    check = FileChecksums(part for parts in of_leaf.values() for part in parts)

    def read(path: tuple, shape: jax.ShapeDtypeStruct, sharding: Sharding, kept: Any = None) -> Any:
        parts = of_leaf.get(names[path_name(path)])
        return kept if parts is None else read_leaf(parts, shape, sharding, check)

    kept = () if params is None else (params,)
    result = jax.tree_util.tree_map_with_path(read, shapes, shardings, *kept)
    check.finish(directory)
    return result


def from_cache(source: str | os.PathLike[str]) -> Path:
    """Return the directory of a model that the Hugging Face Hub's local cache has; other paths as they are."""
    path = Path(source)
    if len(path.parts) == 2 and not path.exists():
        with contextlib.suppress(ImportError, ValueError):  # a name that the Hub does not allow
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(path.as_posix(), "config.json")
            return Path(found).parent if isinstance(found, str) else path
    return path


def file_names(step: TrainStep) -> dict[str, str]:
    """Map the names of the parameters to those in files, with {layer} for one tensor per layer."""
    names = getattr(step.model, "names", None)
    own = [layout.name for layout in jax.tree.leaves(step.layouts)]
    return {name: name if names is None else names.template(name) for name in own}


def names_in_files(names: Sequence[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Map the names of parameters to those, dotted, under which files have them.

    Raises:
      ConfigError: an expression that changes no name, or two parameters of one name.

    >>> names_in_files(["fc/base_module/kernel", "fc/lora_a"], {"base_module/": ""})
    {'fc/base_module/kernel': 'fc.kernel', 'fc/lora_a': 'fc.lora_a'}
    """
    if not isinstance(rename, Mapping):
        raise ConfigError(f'rename = {rename!r}: must be a dict, such as {{"base_module/": ""}}')
    found = {name: name for name in names}
    for old, new in rename.items():
        matched(list(found.values()), [old], "rename")
        try:
            found = {name: re.sub(old, new, other) for name, other in found.items()}
        except (re.error, TypeError) as error:
            raise ConfigError(f"rename: {new!r} is not a replacement for {old!r}: {error}") from None
    if twice := [name for name, times in Counter(found.values()).items() if times > 1]:
        raise ConfigError(f"rename = {dict(rename)}: two parameters get the name {some_of(twice)}")
    return {name: dotted(other) for name, other in found.items()}


def matched(names: Sequence[str], patterns: Sequence[str], key: str = "missing") -> list[str]:
    """Return the names that one of the regular expressions matches.

    Raises:
      ConfigError: no list, one that is no regular expression, or matches nothing.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"{key} = {patterns!r}: must be a list; write [{patterns!r}]")
    found: list[str] = []
    for pattern in patterns:
        try:
            hits = [name for name in names if re.search(pattern, name)]
        except (re.error, TypeError) as error:
            raise ConfigError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
        if not hits:
            raise ConfigError(f"{key}: {pattern!r} matches no parameter; the names are {some_of(names)}")
        found += hits
    return found


def _find(
    path: Path, leaves: Mapping[str, ShapeDtype], table: Table | None, optional: Collection[str], has_others: bool
) -> dict[str, list[tuple[File, Tensor]]]:
    """Map every leaf to the (file, tensor) pairs that contain its parts.

    Args:
      optional: the leaves that the files may lack, besides the adapters that the table declares.
      has_others: whether there are values for the leaves that files with adapters alone lack.

    Raises:
      ConfigError: the files do not fit the model.
    """
    path = from_cache(path)
    table, files = table or {}, unpacked_fp8(unpacked([File.open(file) for file in _files(path)]))
    adapters = adapter_leaves(table)
    alone = [file.path.name for file in files] == [ADAPTER_FILE]
    if problem := _unclear(path, adapters, alone, has_others):
        raise ConfigError(f"{path} contains {problem}")
    count = sum(len(file.entries) for file in files)
    for old, new in table.get("aliases", {}).items():
        for file in files:
            file.entries = {re.sub(old, new, name): entry for name, entry in file.entries.items()}
    where = {name: file for file in files for name in file.entries}
    if len(where) != count:
        raise ConfigError(f"{path}: some tensors are in two of {some_of(file.path.name for file in files)}")
    known = {dotted(row["leaf"]) for row in table.get("tensors", ())} or {*leaves}
    described = {name: x for name, x in leaves.items() if name in known or name in adapters or name not in optional}
    wanted = tensors(described, table) + (tensors(described, table, adapters=True) if adapters else [])
    for name, parts in by_tensor(wanted).items():
        if name in where:
            where[name].divide(name, parts)
    where = {name: file for file in files for name in file.entries}
    if len(where.keys() & leaves.keys()) > sum(tensor.name in where for tensor in wanted):
        table, wanted = {}, tensors(leaves, None)  # the files use the names of the leaves
    may_lack = known if alone else {*optional, *adapters}
    there = {tensor.leaf for tensor in wanted if tensor.name in where}
    wanted = [tensor for tensor in wanted if tensor.leaf in there or tensor.leaf not in may_lack]
    ignored = table.get("ignored", ())
    where = {name: file for name, file in where.items() if not any(fnmatchcase(name, pattern) for pattern in ignored)}
    directory = path.parent if path.is_file() else path
    problems = _config_differences(directory / "config.json", table) + misfits(where, wanted)
    if alone and table:
        problems = _config_differences(directory / ADAPTER_CONFIG, table["adapters"]) + problems
    if problems:
        lora = f"give the decoder the lora=LoRAConfig(...) of {ADAPTER_CONFIG}"
        advice = lora if alone else table.get("advice")
        raise ConfigError(f"{path} belongs to another model: {some_of(problems)}{f'; {advice}' if advice else ''}")
    of_leaf: dict[str, list[tuple[File, Tensor]]] = {}
    for tensor in wanted:
        where[tensor.name].reshape(tensor.name, tensor.view)
        of_leaf.setdefault(tensor.leaf, []).append((where[tensor.name], tensor))
    return of_leaf


def _unclear(path: Path, adapters: Collection[str], alone: bool, has_others: bool) -> str:
    """Explain why it is not clear how to load the adapters in a directory; "" if it is."""
    if alone and not adapters:
        return f"adapters alone, and the model has none: give the decoder the lora=LoRAConfig(...) of {ADAPTER_CONFIG}"
    if alone and not has_others:
        return "adapters alone: load the model's weights first, and pass them as params"
    if adapters and not alone and (path / ADAPTER_FILE).is_file():
        return f"{ADAPTER_FILE} next to other weights, which may contain it already: pass the file that you mean"
    return ""


def _files(path: Path) -> list[Path]:
    """List the safetensors files of `path`, chosen in the order that transformers uses."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        raise ConfigError(no_such_directory(path, "directory or .safetensors file"))
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if (index := path / "model.safetensors.index.json").is_file():
        return _indexed(index)
    if found := sorted(path.glob("*.safetensors")):
        return found
    if torch := sorted(file.name for pattern in TORCH for file in path.glob(pattern)):
        raise ConfigError(
            f"{path} contains {some_of(torch)}: read pytorch_model*.bin with engine.load_checkpoint, or convert it to "
            "safetensors, with transformers: AutoModelForCausalLM.from_pretrained(this).save_pretrained(other)"
        )
    raise ConfigError(f"{path} contains no *.safetensors: pass the directory of an export or a download")


def _indexed(index: Path) -> list[Path]:
    """List the files of an index, which must lie beside it: a downloaded index must not choose other files to read."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        for name in names:
            if Path(name).name != name or name in ("", "..") or len(name) > 255 or not name.isprintable():
                raise ValueError(f"{ascii(name)[:80]} is not the name of a file in its directory")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from None
    return [index.with_name(name) for name in names]


def _config_differences(file: Path, table: Table) -> list[str]:
    """List the entries of a config.json (or adapter_config.json) beside the files that contradict the model."""
    if not table or not file.is_file():
        return []
    try:
        read = json.loads(file.read_text())
        text = read.get("text_config")
        if isinstance(text, dict) and text.get("model_type") == table["config"].get("model_type"):
            read = text  # the model is the text decoder of one with other inputs too
        there = {**table.get("absent", {}), **_flattened(read)}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from None
    here = _flattened(table["config"])
    same = here.keys() - set(table.get("may_differ", ()))
    return [
        f"{file.name} has {key} = {json.dumps(there[key])}, not {json.dumps(here[key])}"
        for key in sorted(same & there.keys())
        if there[key] != here[key]
    ]


def _flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Add the entries of nested dictionaries, which transformers versions nest differently, to the top level."""
    inside = {key: value for part in config.values() if isinstance(part, dict) for key, value in part.items()}
    return {**inside, **config}


def misfits(where: Mapping[str, File], wanted: list[Tensor]) -> list[str]:
    """List tensors that are missing, extra, of another shape, or of a dtype that is not cast (only wide floats are)."""
    expected = {t.name: t for t in wanted}
    found = {name: file.entries[name] for name, file in where.items()}
    problems = differences({n: x.shape for n, x in found.items()}, {n: t.shape for n, t in expected.items()})
    for name, tensor in expected.items():
        dtype = found[name].dtype if name in found else tensor.dtype
        floats = [jnp.issubdtype(x, jnp.floating) and x.itemsize > 1 for x in (dtype, tensor.dtype)]
        if dtype != tensor.dtype and not all(floats):
            problems.append(f"{name} is {dtype}, not {tensor.dtype}")
    return problems
