"""`jzero import DIR OUT`: convert a DeepSpeed checkpoint to jzero's format, or compare names of tensors."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

import jax

from jzero import checkpoint, deepspeed
from jzero.checkpoint.restoring import Selection
from jzero.config.config import read_config
from jzero.deepspeed.import_run import BATCH, deepspeed_batch, pair_tensors
from jzero.deepspeed.zero_shards import DeepSpeedState, read_deepspeed
from jzero.display.text_table import text_table
from jzero.errors import ConfigError, in_a_line, one_line
from jzero.planner.named_models import model_alone
from jzero.run.restore import make_notes, plan_restore
from jzero.step.train_step import TrainStep, make_train_step

OF_DEVICES = (*BATCH[1:], "mesh")


def main(args: Namespace) -> int:
    """Run the command on this machine's CPU; return 1 if names are compared and differ.

    Raises:
      ConfigError: no checkpoint of DeepSpeed, no such model, or one of another model.
    """
    jax.config.update("jax_platforms", "cpu")
    path = deepspeed.find_deepspeed(args.directory, args.tag)
    if path is None:
        raise ConfigError(
            f"{args.directory} is no checkpoint of DeepSpeed: pass the directory given to save_checkpoint"
        )
    stored = read_deepspeed(path)
    step = make_train_step(model_alone(args.model), _config(stored, args.config))
    rename = _read_rename(args.rename) if args.rename else None
    if args.names:
        text, differ = compare_names(stored, step, rename)
        print(text)
        return int(differ)
    if not args.out:
        raise ConfigError("jzero import DIR OUT: give a directory for the checkpoint, or --names")
    source = deepspeed.DeepSpeedCheckpoint(path, step, jax.random.key(0), rename)
    former = None
    if source.weights_alone:
        print(f"{path} {deepspeed.WEIGHTS_ALONE}")
        former = step.init(jax.random.key(0))
    state = plan_restore(source, step, former, Selection(only_module=source.weights_alone))()
    notes = make_notes(step, None, source.notes["engine"], source.notes["client"])
    print(checkpoint.save(state, args.out, notes=notes).wait())
    return 0


def _config(stored: DeepSpeedState, file: str | None) -> dict:
    """Return the config of the file, else DeepSpeed's own, for one device: with the run's batch, not its division."""
    config = read_config(file) if file else stored.model.get("ds_config")
    if not isinstance(config, dict):
        raise ConfigError(f"{stored.path} does not contain its config: pass --config FILE")
    if sizes := deepspeed_batch(stored.model, config):
        config = {"train_batch_size": sizes["train"]} | config
    return {key: x for key, x in config.items() if key not in OF_DEVICES}


def _read_rename(file: str) -> dict[str, str]:
    must = 'must be a file of JSON, {"regular expression": "replacement"}, as jzero import --names prints one'
    try:
        rename = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"--rename {file}: {must}; {in_a_line(error)}") from None
    if not isinstance(rename, dict) or not all(isinstance(name, str) for name in rename.values()):
        raise ConfigError(f"--rename {file}: {must}")
    return rename


def compare_names(stored: DeepSpeedState, step: TrainStep, rename: deepspeed.Rename | None) -> tuple[str, bool]:
    """Return a table of both sides' tensors, with a proposal for what is missing, and whether they differ."""
    found, files = pair_tensors(stored, step, rename)
    theirs = {name: file.entries[name].shape for name, file in files.items()}
    ours = [tensor for some in found.values() for tensor in some]
    free = {name: theirs[name] for name in theirs if name not in {tensor.name for tensor in ours}}
    near = _propose({tensor.name: tensor.shape for tensor in ours if tensor.name not in theirs}, free)
    rows = []
    for tensor in ours:
        shape, remark = theirs.get(tensor.name), ""
        if shape is None:
            remark = "missing"
            if best := near.get(tensor.name):
                alike = [*free.values()].count(tensor.shape)
                remark += f"; perhaps {best}" + (f", one of {alike} with this shape" if alike > 1 else "")
        elif shape != tensor.shape:
            remark = f"has {shape} there"
        rows.append([tensor.leaf, tensor.name, str(tensor.shape), remark])
    unused = [["", name, str(theirs[name]), "in DeepSpeed alone"] for name in free]
    columns = ["leaf", "tensor", "shape", "remark"]
    text = f"{one_line(str(stored.path))}\n{text_table('', columns, rows + unused, left=columns)}"
    proposed = {f"^{name.replace('.', '[.]')}$": best for name, best in near.items()}
    hint = f"\n--rename FILE and rename= take, for example:\n{json.dumps(proposed, indent=1)}" if proposed else ""
    return text + hint, bool(unused) or any(row[3] for row in rows)


def _propose(missing: Mapping[str, tuple[int, ...]], free: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Map missing names to free ones of the same shape: of a layer with the same tensors if there is one, then by name.

    The bias of a layer is then not taken for that of a norm, which has the same shape.

    >>> sizes = {"0.weight": (4,), "0.bias": (4,), "1.weight": (4, 8), "1.bias": (4,)}
    >>> _propose({"fc.bias": (4,), "fc.weight": (4, 8)}, sizes)
    {'fc.bias': '1.bias', 'fc.weight': '1.weight'}
    """
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in [*missing.items(), *free.items()]:
        layer, _, last = name.rpartition(".")
        layers.setdefault(layer, {})[last] = shape
    found: dict[str, str] = {}
    of_layer: dict[str, str] = {}

    def likeness(name: str, other: str) -> tuple[bool, bool, float]:
        layer, own = other.rpartition(".")[0], name.rpartition(".")[0]
        return of_layer.get(own) == layer, layers[own] == layers[layer], SequenceMatcher(None, other, name).ratio()

    for name, shape in missing.items():
        alike = [other for other in free if free[other] == shape and other not in found.values()]
        if alike:
            found[name] = max(alike, key=partial(likeness, name))
            of_layer[name.rpartition(".")[0]] = found[name].rpartition(".")[0]
    return found
