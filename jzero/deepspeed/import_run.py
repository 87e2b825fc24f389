"""Read the leaves of a train state from the files of a DeepSpeed checkpoint."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jzero.checkpoint.directory import checkpoint_path, read_latest
from jzero.checkpoint.reader import Checkpoint
from jzero.deepspeed.torch_files import Pickled, TorchTensor
from jzero.deepspeed.zero_shards import COUNTERS, MASTER, DeepSpeedState, is_deepspeed, read_deepspeed, weight_files
from jzero.errors import ConfigError, in_a_line, some_of
from jzero.model import weights_layout
from jzero.step.state import RUN_KEY, check_key
from jzero.step.train_step import TrainStep
from jzero.stored_names import stored_names
from jzero.tree import named
from jzero.weights.leaf_reader import read_leaf
from jzero.weights.load import file_names, misfits, names_in_files
from jzero.weights.name_map import Tensor, dotted, leaves_of, tensors
from jzero.weights.safetensors import File

Rename = Mapping[str, str] | Callable[[str], str]
# A field of an optimizer's state here -> its names in PyTorch's and DeepSpeed's optimizers.
MOMENTS = {
    "mu": ("exp_avg",), "nu": ("exp_avg_sq",), "trace": ("momentum_buffer",), "sum_of_squares": ("sum", "exp_avg_sq")
}  # fmt: skip
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
WEIGHTS_ALONE = "has weights alone: optimizer, learning rate, loss scale and counters stay as they are in this engine"
WEIGHT = re.compile(r"(^|\.)(kernel|scale|embedding)$")
# What DeepSpeed writes into model states; the rest is the caller's client_state.
OWN = {
    *COUNTERS, "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info",
    "sparse_tensor_module_names", "num_experts", "loss_scaler",
}  # fmt: skip


def find_deepspeed(directory: str | os.PathLike | None, tag: str | float | None = None) -> Path | None:
    """Find the DeepSpeed checkpoint of a tag, else the one that the directory is or names; None if there is none.

    A directory without `latest` may have weights alone, and `directory` may be a file of them.
    """
    path = checkpoint_path(directory, "any" if tag is None else tag)
    if tag is None:
        root = path.parent
        if is_deepspeed(root):
            return root
        found = read_latest(root)[0] or read_latest(root, "latest_universal")[0]
        if found is None:
            return root if weight_files(root) else None
        path = root / found
    return path if is_deepspeed(path) else None


class DeepSpeedCheckpoint(Checkpoint):
    """A DeepSpeed checkpoint as a source of a step's state. Every process reads only what its own devices need.

    Args:
      path: of its directory.
      step: the train step whose state is read.
      rng: the key of the run, which DeepSpeed's files do not have.
      rename: maps jzero's names to DeepSpeed's: {regular expression: replacement}, or a function.

    Raises:
      ConfigError: it is damaged, or belongs to another model; the message names the tensors that are missing, extra or
        of another shape.
    """

    def __init__(self, path: Path, step: TrainStep, rng: jax.Array, rename: Rename | None = None):
        stored = read_deepspeed(path)
        self.path, self.without, self.weights_alone = path, {}, stored.weights_alone
        key = jax.random.fold_in(check_key(rng), RUN_KEY)
        self.keys = {"rng": str(jax.random.key_impl(key))}
        shapes = named(step.state_shapes)
        self._parts: dict[str, list[tuple[File, Tensor]]] = {}
        try:
            self.notes, scalars = _notes(stored, step), _scalars(stored, step, shapes)
        except Exception as error:  # a pickle's numbers may be anything, and its lists nested without end
            raise ConfigError(f"{path} is damaged: its counters: {in_a_line(error)}") from None
        self._values = {"rng": np.asarray(jax.random.key_data(key))} | scalars
        kinds = _kinds(shapes, set(file_names(step)))
        matched = match_tensors(stored, step, rename)
        all_names = stored_names(step.state_shapes, shapes)
        self.shapes = {name: x.shape for name, x in self._values.items()}
        self.dtypes = {name: str(x.dtype) for name, x in self._values.items()}
        for leaf, (parameter, candidates) in kinds.items():
            kind = next((kind for kind in candidates if _has(stored, kind, matched[parameter])), None)
            if kind is None:
                continue
            layers, shape = all_names[leaf], shapes[leaf].shape
            for i, name in enumerate(layers):
                own = [t for t in matched[parameter] if len(layers) == 1 or t.layer == i]
                own = own if len(layers) == 1 else [dataclasses.replace(t, layer=None) for t in own]
                self._parts[name] = [(stored.tensors[kind], tensor) for tensor in own]
                self.shapes[name], self.dtypes[name] = shape[len(layers) > 1 :], str(shapes[leaf].dtype)

    def read(self, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        """Read leaves by name, each with the given sharding."""
        found = {}
        for name, sharding in shardings.items():
            if name in self._parts:
                leaf = jax.ShapeDtypeStruct(self.shapes[name], np.dtype(self.dtypes[name]))
                found[name] = read_leaf(self._parts[name], leaf, sharding)
                continue
            found[name] = jax.make_array_from_callback(
                self._values[name].shape, sharding, self._values[name].__getitem__
            )
        return found | {
            name: jax.random.wrap_key_data(found[name], impl=impl) for name, impl in self.keys.items() if name in found
        }


# ---- names --------------------------------------------------------------------------------------------------------


def wanted_tensors(step: TrainStep, rename: Rename | None = None) -> dict[str, list[Tensor]]:
    """Map the step's parameters to the tensors that they are in DeepSpeed.

    A model with a table (`weights_layout`) has its names. Without one, a tensor has the name of its leaf, with dots; a
    `kernel` is a `weight` with its axes reversed, as PyTorch stores it, and `scale` and `embedding` are a `weight`.
    """
    own = {name: dotted(other) for name, other in file_names(step).items()}
    leaves = dict(zip(own.values(), leaves_of(step.state_shapes.params).values(), strict=True))
    stacked = [layout.stacked for layout in jax.tree.leaves(step.layouts)]
    rows = [_row(leaf, len(x.shape), in_stack) for (leaf, x), in_stack in zip(leaves.items(), stacked, strict=True)]
    table = weights_layout(step.model) or {"tensors": rows}
    found: dict[str, list[Tensor]] = {leaf: [] for leaf in leaves}
    made = tensors(leaves, table)
    renamed = _renamed([tensor.name for tensor in made], rename)
    for tensor, name in zip(made, renamed, strict=True):
        found[tensor.leaf].append(dataclasses.replace(tensor, name=name))
    return {name: found[leaf] for name, leaf in own.items()}


def _row(leaf: str, dims: int, stacked: bool) -> dict[str, Any]:
    """Describe a leaf of a model without a table; each layer of a stack is a tensor."""
    name = leaf if "{layer}" in leaf or not stacked else re.sub(r"^stack\b", "stack.{layer}", leaf)
    dims -= "{layer}" in name
    axes = [*reversed(range(dims))] if leaf.endswith("kernel") and dims > 1 else None
    return {"name": WEIGHT.sub(r"\1weight", name), "leaf": leaf, "transposed": axes}


def _of_pipeline(start: int, name: str) -> str:
    """Return DeepSpeed's name of a PipelineModule's tensor, whose stack begins with layer `start`.

    >>> [_of_pipeline(1, name) for name in ("ends.layers.0.bias", "stack.2.bias", "ends.tied.a.bias")]
    ['0.bias', '3.bias', 'tied_modules.a.bias']
    """
    name = re.sub(r"^stack\.(\d+)\.", lambda found: f"{start + int(found[1])}.", name)
    return re.sub(r"^(ends\.)?tied\.", "tied_modules.", re.sub(r"^(ends\.)?layers\.", "", name))


def _renamed(names: list[str], rename: Rename | None) -> list[str]:
    if callable(rename):
        return [rename(name) for name in names]
    return [*names_in_files(names, rename or {}).values()]


def pair_tensors(
    stored: DeepSpeedState, step: TrainStep, rename: Rename | None
) -> tuple[dict[str, list[Tensor]], Mapping[str, File]]:
    """Map the step's parameters to the tensors that they are there, and DeepSpeed's tensors that count to their file.

    Tensors that a model's table ignores do not count, nor do buffers that are no parameter here.
    """
    if rename is None and stored.model["module"] is None:
        rename = partial(_of_pipeline, getattr(getattr(step.model, "stack", None), "start", 0))
    table, found = weights_layout(step.model) or {}, wanted_tensors(step, rename)
    for old, new in table.get("aliases", {}).items():
        for pieces in stored.tensors.values():
            pieces.rename(partial(re.sub, old, new))
    ours, ignored = {tensor.name for some in found.values() for tensor in some}, table.get("ignored", ())
    theirs = {
        name: stored.tensors[MASTER] for name in stored.tensors[MASTER].entries
        if name in ours or not (name in stored.buffers or any(fnmatchcase(name, pattern) for pattern in ignored))
    }  # fmt: skip
    return found, theirs


def match_tensors(stored: DeepSpeedState, step: TrainStep, rename: Rename | None) -> dict[str, list[Tensor]]:
    """Map the step's parameters to DeepSpeed's tensors, and let all kinds of them be read by the tensors' boxes.

    Raises:
      ConfigError: they differ.
    """
    found, theirs = pair_tensors(stored, step, rename)
    wanted = [tensor for some in found.values() for tensor in some]
    if problems := misfits(theirs, wanted):
        of_jzero = "; weights that jzero wrote are read with engine.load_weights(DIRECTORY)" * stored.weights_alone
        raise ConfigError(
            f"{stored.path} belongs to another model: {some_of(problems)}{of_jzero}; jzero import {stored.path} "
            "--names --model MODULE:FUNCTION prints the names and shapes of both; rename={regular expression: "
            "replacement} turns ours into DeepSpeed's"
        )
    for tensor in wanted:
        for pieces in stored.tensors.values():
            if tensor.name in pieces.entries:
                pieces.reshape(tensor.name, tensor.view)
    return found


def _has(stored: DeepSpeedState, kind: str, some: list[Tensor]) -> bool:
    """Return whether all tensors of a parameter are there; adapters, which DeepSpeed names otherwise, have none."""
    return bool(some) and kind in stored.tensors and all(tensor.name in stored.tensors[kind].entries for tensor in some)


def _kinds(shapes: Mapping[str, jax.ShapeDtypeStruct], parameters: set[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Map the leaves that DeepSpeed stores as tensors to (their parameter, the kinds that it may have there)."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for leaf in shapes:
        keys = leaf.split("/")
        for i in range(1, len(keys) + 1):
            if (parameter := "/".join(keys[i:])) in parameters:
                kinds = (MASTER,) if keys[:i] == ["params"] else MOMENTS.get(keys[i - 1])
                found |= {leaf: (parameter, kinds)} if kinds else {}
                break
    return found


# ---- numbers ------------------------------------------------------------------------------------------------------


def _scalars(
    stored: DeepSpeedState, step: TrainStep, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
    """Return the counts of a state, and its loss scale."""
    model, scaler = stored.model, stored.scaler
    applied = model["global_steps"] - model["skipped_steps"]
    updates = applied if stored.steps is None else stored.steps  # DeepSpeed's fp16 optimizers count one more
    schedule = model.get("lr_scheduler") or {}
    scheduled = schedule.get("last_batch_iteration", applied - 1) + 1
    values: dict[str, Any] = {
        "step": model["global_steps"],
        "loss_scale/scale": scaler.get("cur_scale", 1.0),
        "loss_scale/hysteresis": scaler.get("cur_hysteresis", step.precision.scaler.hysteresis),
        "loss_scale/iteration": scaler.get("cur_iter", model["global_steps"]),
        "loss_scale/last_overflow": scaler.get("last_overflow_iter", -1),
        "loss_scale/stuck": 0,
        "loss_scale/skipped": model["skipped_steps"],
        "loss_scale/culprits": False,
    }
    for name in shapes:
        if name.startswith("opt_state/") and name.endswith("/count"):
            siblings = {other.removeprefix(name[:-5]).split("/")[0] for other in shapes if other.startswith(name[:-5])}
            values[name] = scheduled if siblings.isdisjoint(MOMENTS) else updates
    return {name: np.full(shapes[name].shape, x, shapes[name].dtype) for name, x in values.items() if name in shapes}


def _notes(stored: DeepSpeedState, step: TrainStep) -> dict[str, Any]:
    """Make the notes that an engine would have written."""
    model, scaler, sizes = stored.model, stored.scaler, step.batch_sizes
    dynamic = bool(scaler.get("dynamic", scaler.get("dynamic_loss_scale", False)))
    config = model.get("ds_config") or {}
    halves = [key for key in ("bf16", "fp16") if (config.get(key) or {}).get("enabled")]
    return {
        "engine": {
            "global_steps": model["global_steps"], "global_samples": model["global_samples"],
            "micro_steps": model["global_steps"] * (sizes.train // sizes.micro // step.replicas),
        },
        "batch": {"train": sizes.train, "micro": sizes.micro, "replicas": step.replicas}
        | deepspeed_batch(model, config),
        "data": None,
        "precision": (halves or ["fp32"])[0],
        "loss_scale": {"dynamic": dynamic, "static": None if dynamic else scaler.get("cur_scale", 1.0)},
        "client": {key: x for key, x in model.items() if key not in OWN and _is_json(x, [10_000])},
    }  # fmt: skip


def deepspeed_batch(model: Mapping[str, Pickled], config: Mapping[str, Pickled]) -> dict[str, Pickled]:
    """Return the batch sizes of DeepSpeed's run, as an engine's notes have them; {} if the files do not say.

    `dp_world_size` counts the devices of a sequence too, which DeepSpeed's batch does not. With `data_parallel_size`
    in the config it is the replicas alone; of a caller's `mpu` the files say nothing, but the count of samples does.
    Source: deepspeed/__init__.py, runtime/config.py and runtime/engine.py of DeepSpeed 0.19.8.
    """
    given, world = [config.get(key) for key in BATCH], model.get("dp_world_size") or 0
    sequence = 1 if "data_parallel_size" in config else config.get("sequence_parallel_size", 1)
    sizes = [world, sequence, *(n for n in given if n is not None)]
    if not all(type(n) is int and 0 < n < 2**31 for n in sizes) or world % sequence:
        return {}
    train, micro, accum = given
    replicas = world // sequence
    accum = accum or (train // (micro * replicas) if train and micro else 1)
    micro = micro or (train // (accum * replicas) if train and accum else 0)
    product = micro * accum * replicas
    says = product == train if train else product * model["global_steps"] == model["global_samples"]
    return {"train": product, "micro": micro, "replicas": replicas, "given": given} if product and says else {}


def _is_json(x: Pickled, budget: list[int]) -> bool:
    """Return whether JSON can represent a value of `client_state`; a pickle may refer to one list a billion times."""
    budget[0] -= 1
    if budget[0] < 0 or isinstance(x, TorchTensor):
        return False
    if isinstance(x, dict):
        return all(isinstance(key, str) and _is_json(part, budget) for key, part in x.items())
    if type(x) in (list, tuple):
        return all(_is_json(part, budget) for part in x)
    return isinstance(x, str | int | float | None)
