"""`jzero export DIR OUT`: write a checkpoint's parameters as safetensors, for `transformers` where possible."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jzero.display.slow_work import slow_work
from jzero.errors import ConfigError
from jzero.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Merge, check_alone, declared
from jzero.weights.checkpoint_parameters import CheckpointParameters
from jzero.weights.name_map import Tensor, tensors, widest, with_dtype
from jzero.weights.tensor_writer import TensorWriter, unwritable

DTYPES = {
    "float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("float16")
}  # fmt: skip
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
UNFINISHED = "unfinished"  # directory in OUT that contains the files until all of them are complete


@slow_work("exporting the parameters")
def export(
    directory: str | Path, out: str | Path, *, tag: str | float | None = None, dtype: str | None = None,
    max_shard_size: str | int = "5GB", adapters: bool = False,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Write a checkpoint's parameters to `out` as safetensors, one chunk at a time.

    If the model has a `weights_layout` and an engine saved the checkpoint (or `save` got notes={"weights":
    model.weights_layout()}), the tensors have its names and a config.json is written. Otherwise they have the names of
    the leaves. Adapters that the model declares are merged into their matrices. The files appear in `out` once all of
    them are complete.

    Host memory: two chunks of a leaf (a chunk is the part that one device wrote), a file window of 32 MiB, adapters.

    Args:
      directory: the directory that was given to `save_checkpoint`.
      out: a new or empty directory.
      tag: of the checkpoint; default: the last.
      dtype: "float32", "bfloat16" or "float16"; default: the widest that a stored parameter has.
      max_shard_size: maximum size of a file; a single larger tensor still gets a file.
      adapters: write the adapters alone, in the format of `peft`.

    Returns:
      file name -> its tensors

    Raises:
      ConfigError: no checkpoint, one without parameters that are needed, no adapters, parameters that an engine
        trained beside them, `out` is not empty or not writable, or an invalid size.
    """
    limit = parse_size(max_shard_size)
    checkpoint = CheckpointParameters(directory, tag)
    table = checkpoint.notes.get("weights")
    if adapters:
        check_alone(checkpoint.notes.get("trained_beside_adapters", ()), "jzero export without --adapters")
    needed = checkpoint.require(declared(table) if adapters else None)
    to = DTYPES[dtype] if dtype else widest(checkpoint.leaves[name].dtype for name in needed)
    some = with_dtype(tensors(checkpoint.leaves, table, adapters=adapters), to)
    files = {ADAPTER_FILE: some} if adapters else shards(some, limit)
    merge = Merge(checkpoint.leaves, None if adapters else table)
    out = Path(out)
    draft, is_new = out / UNFINISHED, not out.exists()
    try:
        if not is_new and any(path.name != UNFINISHED for path in out.iterdir()):
            raise ConfigError(f"{out} is not empty: choose a new or empty directory")
        shutil.rmtree(draft, ignore_errors=True)  # left by an interrupted export
        draft.mkdir(parents=True)
        try:
            writer = TensorWriter({draft / name: some for name, some in files.items()})
            for leaf in merge.ordered(needed):
                for box, values in checkpoint.read(leaf):
                    for part in merge(leaf, box, values):
                        writer.write(leaf, *part)
                    del values  # free the chunk before the next one is read
            writer.close()
            names = [*files]
            if len(files) > 1:
                names.append("model.safetensors.index.json")
                write_json(draft / names[-1], index(files))
            if adapters:
                names.append(ADAPTER_CONFIG)
                write_json(draft / names[-1], table["adapters"]["config"])
            elif table:
                names.append("config.json")
                write_json(draft / names[-1], config_json(table, files))
            for name in names:
                (draft / name).rename(out / name)
            draft.rmdir()
        except BaseException:
            shutil.rmtree(out if is_new else draft, ignore_errors=True)
            raise
    except OSError as error:
        raise unwritable(out, error) from None
    return files


def parse_size(size: str | int) -> int:
    """Convert a size to bytes.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(4096)
    (5000000000, 1572864, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper())
    if match is None or match[2] not in UNITS or not (n := int(float(match[1]) * UNITS[match[2]])):
        raise ConfigError(f"max_shard_size = {size!r}: must be a size such as 5GB, 500MB or 1GiB")
    return n


def shards(some: Iterable[Tensor], limit: int) -> dict[str, list[Tensor]]:
    """Divide tensors into files of at most `limit` bytes, in order; the files are named as by transformers."""
    groups: list[list[Tensor]] = [[]]
    room = limit
    for tensor in some:
        if tensor.nbytes > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def index(files: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Return the contents of model.safetensors.index.json."""
    where = {tensor.name: name for name, some in files.items() for tensor in some}
    return {"metadata": {"total_size": sum(t.nbytes for some in files.values() for t in some)}, "weight_map": where}


def config_json(table: dict[str, Any], files: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Return the contents of config.json: the table's config, and the dtype under the key of transformers 4 and 5."""
    dtype = next(iter(files.values()))[0].dtype
    return {**table["config"], "torch_dtype": dtype.name}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
