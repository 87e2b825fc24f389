"""`jzero export DIR OUT`: a checkpoint's parameters as safetensors, for `transformers` if the model says how."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jzero.errors import ConfigError
from jzero.weights.checkpoint_parameters import Parameters
from jzero.weights.name_map import Tensor, cast, tensors
from jzero.weights.tensor_writer import Writer, unwritable

DTYPES = {
    "float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("float16")
}  # fmt: skip
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
UNFINISHED = "unfinished"  # the directory in OUT in which the files are until all of them are whole


def main(argv: Sequence[str]) -> int:
    """Export and say what was written."""
    p = argparse.ArgumentParser(prog="jzero export", description=__doc__)
    p.add_argument("checkpoint", metavar="DIR", help="save_checkpoint's directory")
    p.add_argument("out", metavar="OUT", help="a new or empty directory")
    p.add_argument("--tag", help="which checkpoint of DIR; default: the last")
    p.add_argument("--dtype", choices=DTYPES, help="default: the one it has")
    p.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="of a file, as 5GB or 500MB (default: 5GB)")
    a = p.parse_args(argv)
    files = export(a.checkpoint, a.out, tag=a.tag, dtype=a.dtype, max_shard_size=a.max_shard_size)
    total = sum(t.nbytes for some in files.values() for t in some)
    print(f"{a.out}: {sum(map(len, files.values()))} tensors, {total / 1e9:.3g} GB, in {', '.join(files)}")
    if not (Path(a.out) / "config.json").exists():
        print("named as the leaves are: the model has no weights_layout, or jzero.checkpoint.save wrote without one")
    return 0


def export(
    directory: str | Path, out: str | Path, *, tag: str | float | None = None, dtype: str | None = None,
    max_shard_size: str | int = "5GB",
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Write a checkpoint's parameters to `out`, chunk by chunk; returns file name -> its tensors.

    The names are those of the model's `weights_layout` if it has one and an engine saved the checkpoint (or `save` was
    given notes={"weights": model.weights_layout()}), and config.json is written with them; else the leaves' own. `out`
    has the files once all of them are whole. Host memory: two chunks of a leaf and a window of 32 MiB, where a chunk is
    what one device wrote of it.

    Args:
      dtype: "float32", "bfloat16" or "float16"; default: as stored.
      max_shard_size: a file holds no more, but for a tensor that alone is more.

    Raises:
      ConfigError: no checkpoint there, `out` not empty or not writable, a size that is none.
    """
    limit = parse_size(max_shard_size)
    checkpoint = Parameters(directory, tag)
    table = checkpoint.notes.get("weights")
    files = shards(cast(tensors(checkpoint.leaves, table), DTYPES[dtype] if dtype else None), limit)
    out = Path(out)
    draft, ours = out / UNFINISHED, not out.exists()
    try:
        if not ours and any(path.name != UNFINISHED for path in out.iterdir()):
            raise ConfigError(f"{out} is not empty: give a new or an empty directory")
        shutil.rmtree(draft, ignore_errors=True)  # what an interrupted export left
        draft.mkdir(parents=True)
        try:
            writer = Writer({draft / name: some for name, some in files.items()})
            for leaf in checkpoint.leaves:
                for box, values in checkpoint.read(leaf):
                    writer.write(leaf, box, values)
                    del values  # before the next is read
            writer.close()
            names = [*files]
            if len(files) > 1:
                names.append("model.safetensors.index.json")
                write_json(draft / names[-1], index(files))
            if table:
                names.append("config.json")
                write_json(draft / names[-1], config_json(table, files))
            for name in names:
                (draft / name).rename(out / name)
            draft.rmdir()
        except BaseException:
            shutil.rmtree(out if ours else draft, ignore_errors=True)
            raise
    except OSError as error:
        raise unwritable(out, error) from None
    return files


def parse_size(size: str | int) -> int:
    """A number of bytes.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(4096)
    (5000000000, 1572864, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper())
    if match is None or match[2] not in UNITS or not (n := int(float(match[1]) * UNITS[match[2]])):
        raise ConfigError(f"max_shard_size = {size!r}: must be a size such as 5GB, 500MB or 1GiB")
    return n


def shards(some: Iterable[Tensor], limit: int) -> dict[str, list[Tensor]]:
    """file name -> tensors of at most `limit` bytes together, in order; a single file is called model.safetensors."""
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
    """model.safetensors.index.json."""
    where = {tensor.name: name for name, some in files.items() for tensor in some}
    return {"metadata": {"total_size": sum(t.nbytes for some in files.values() for t in some)}, "weight_map": where}


def config_json(table: dict[str, Any], files: dict[str, list[Tensor]]) -> dict[str, Any]:
    """The table's config with the dtype of its files, under the name that transformers 4 and 5 read."""
    dtype = next(iter(files.values()))[0].dtype
    return {**table["config"], "torch_dtype": dtype.name}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
