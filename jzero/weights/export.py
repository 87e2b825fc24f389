"""`jzero export DIR OUT`: write a checkpoint's parameters as safetensors, for `transformers` where possible."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jzero.checkpoint.checksums import part_of_checksum
from jzero.checkpoint.directory import STATE, find_checkpoint
from jzero.checkpoint.reader import Checkpoint
from jzero.display.slow_work import slow_work
from jzero.distributed.place import log_dist
from jzero.errors import CheckpointError, ConfigError, in_a_line, some_of
from jzero.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Merge, check_alone, declared
from jzero.weights.name_map import Box, ShapeDtype, Table, Tensor, by_tensor, dotted, tensors, widest, with_dtype
from jzero.weights.safetensors import TensorWriter

DTYPES = {
    "float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("float16")
}  # fmt: skip
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
COMPANIONS = (
    "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*.tiktoken", "tekken.json", "chat_template.*", "additional_chat_templates",
    "preprocessor_config.json",
)  # fmt: skip
READ_AT_ONCE = 32 * 2**20  # bytes: smaller leaves are read at once
PARAMS = "params/"
UNFINISHED = "unfinished"  # directory in OUT that contains the files until all of them are complete


@slow_work("exporting the parameters")
def export(
    directory: str | Path, out: str | Path, *, tag: str | float | None = None, dtype: str | None = None,
    max_shard_size: str | int = "5GB", adapters: bool = False,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Write a checkpoint's parameters to `out` as safetensors, one chunk at a time.

    If the model has a `weights_layout` and an engine saved the checkpoint (or `save` got notes={"weights":
    model.weights_layout()}), the tensors have its names and a config.json is written; a model from a download gets the
    rest of its config.json, and its tokenizer and generation files. Otherwise they have the names of the leaves.
    Adapters that the model declares are merged into their matrices. The files appear in `out` once all of them are
    complete.

    Host memory: two chunks of a leaf (a chunk is the part that one device wrote), a file window of 32 MiB, adapters.

    Args:
      directory: the directory that was given to `save_checkpoint`.
      out: a new or empty directory.
      tag: of the checkpoint; default: the last.
      dtype: "float32", "bfloat16" or "float16"; default: the widest that a stored parameter has. State keeps its own.
      max_shard_size: maximum size of a file; a single larger tensor still gets a file.
      adapters: write the adapters alone, in the format of `peft`.

    Returns:
      file name -> its tensors

    Raises:
      ConfigError: no checkpoint, one without parameters that are needed, no adapters, parameters that an engine
        trained besides them, `out` is not empty or not writable, or an invalid size.
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
    with writing(out), _complete_or_absent(out) as draft:
        writer = TensorWriter({draft / name: some for name, some in files.items()}, merge)
        for leaf in merge.ordered(needed):
            for box, values in checkpoint.read(leaf):
                writer.write(leaf, box, values)
                del values  # free the chunk before the next one is read
        writer.close()
        if len(files) > 1:
            size = sum(tensor.nbytes for some in files.values() for tensor in some)
            where = {whole: name for name, some in files.items() for whole in by_tensor(some)}
            write_json(draft / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})
        write_configs(table, files, draft, out, adapters)
    return files


@contextlib.contextmanager
def _complete_or_absent(out: Path) -> Iterator[Path]:
    """Give a directory whose files move to `out` at the end; an error deletes them."""
    draft, is_new = out / UNFINISHED, not out.exists()
    if not is_new and any(path.name != UNFINISHED for path in out.iterdir()):
        raise ConfigError(f"{out} is not empty: choose a new or empty directory")
    shutil.rmtree(draft, ignore_errors=True)  # left by an interrupted export
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in sorted(draft.iterdir()):
            path.rename(out / path.name)
        draft.rmdir()
    except BaseException:
        shutil.rmtree(out if is_new else draft, ignore_errors=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError as a ConfigError that says `path` cannot be written."""
    try:
        yield
    except OSError as error:
        full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}{full}") from None


class CheckpointParameters:
    """The parameters of a complete checkpoint, read in parts without the model, the mesh or JAX devices.

    Orbax stores every array as chunks of a zarr array in an OCDBT store, named by its path in the TrainState:
    `params.stack.attention.qkv.kernel`.

    Attributes:
      path: of the checkpoint.
      notes: as given to `jzero.checkpoint.save`.
      leaves: dotted name -> ShapeDtype.
      without: the names of the parameters that were not saved.

    Raises:
      ConfigError: no checkpoint, or an incomplete or unreadable one.
    """

    def __init__(self, directory: str | os.PathLike, tag: str | float | None = None):
        import tensorstore as ts  # 0.1 s, for exports alone

        self.path, self._context = find_checkpoint(directory, tag), ts.Context()
        self._open = ts.open
        try:
            stored = Checkpoint(self.path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        self.notes = stored.notes
        self.without = [dotted(name.removeprefix(PARAMS)) for name in stored.without]
        names = [name for name in stored.shapes if f"{name}/".startswith(PARAMS)]
        self._stored = {dotted(name.removeprefix("params").removeprefix("/")): name for name in names}
        self.leaves = {
            own: ShapeDtype(stored.shapes[name], np.dtype(stored.dtypes[name])) for own, name in self._stored.items()
        }
        self._sums = stored.sums
        if not self.leaves:
            raise ConfigError(f"checkpoint {self.path} contains no parameters")

    def require(self, names: Collection[str] | None = None) -> list[str]:
        """Return the names of all parameters, or those given.

        Raises:
          ConfigError: the checkpoint was saved without one of them.
        """
        if lacking := [name for name in self.without if names is None or name in names]:
            raise ConfigError(
                f"checkpoint {self.path} was saved without {some_of(lacking)} (exclude_frozen_parameters): export a "
                "checkpoint with all parameters; adapters can be exported alone (jzero export --adapters)"
            )
        return list(self.leaves if names is None else names)

    def read(self, name: str) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield a leaf as (box, values), one chunk at a time.

        The boxes are the stored chunks, because reading half a chunk decodes all of it. The checksum is accumulated on
        the way, since the leaf is never in memory as a whole; it is known, and compared, after the last chunk. A caller
        must not publish results computed from the values before the iteration ends.

        Raises:
          ConfigError: a damaged chunk, or (at the end) a wrong checksum.
        """
        (shape, dtype), stored = self.leaves[name], self._stored[name]
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{self.path / STATE}/"}}
        spec = {"driver": "zarr", "kvstore": {**store, "path": f"{dotted(stored)}/"}}
        total = 0
        try:
            array = self._open(spec, open=True, context=self._context).result()
            small = np.prod(shape, dtype=np.int64) * dtype.itemsize <= READ_AT_ONCE
            chunk: Any = shape if small else array.chunk_layout.read_chunk.shape
            for corner in itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
                box = tuple(slice(i, min(i + c, n)) for i, c, n in zip(corner, chunk, shape, strict=True))
                values = array[box].read().result()
                total += part_of_checksum(values, corner, shape)
                yield box, values
        except (ValueError, OSError) as error:
            raise ConfigError(f"checkpoint {self.path}: {name} cannot be read: {in_a_line(error)}") from None
        if total % 2**32 != self._sums[stored]:
            raise ConfigError(f"checkpoint {self.path} is damaged: wrong checksum of {name}")


def parse_size(size: str | int, name: str = "max_shard_size") -> int:
    """Convert a size to bytes, a text with its unit or an integer; `name` is what an error calls it.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(4096)
    (5000000000, 1572864, 4096)
    """
    text = f"{size}B" if isinstance(size, int) else size.strip().upper()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text)
    if match is None or match[2] not in UNITS or not (n := int(float(match[1]) * UNITS[match[2]])):
        hint = f"; did you mean {text}GB?" if match and not match[2] else ""
        raise ConfigError(f"{name} = {size!r}: must be a size such as 5GB, 500MB or 1GiB{hint}")
    return n


def shards(some: Iterable[Tensor], limit: int) -> dict[str, list[Tensor]]:
    """Divide tensors into files of at most `limit` bytes, in order; the files are named as by transformers."""
    groups: list[list[Tensor]] = [[]]
    room = limit
    for parts in by_tensor(some).values():
        size = sum(tensor.nbytes for tensor in parts)
        if size > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1] += parts
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def write_configs(table: Table | None, files: dict[str, list[Tensor]], to: Path, out: Path, adapters: bool) -> None:
    """Write what belongs to the tensors of a model with a table: a config, and the files of the model's download.

    Args:
      to: a directory; its own files stay.
      out: the directory's name in reports.
      adapters: the tensors are the adapters alone, whose config is peft's.
    """
    if table and adapters:
        write_json(to / ADAPTER_CONFIG, table["adapters"]["config"])
    elif table and not (to / "config.json").exists():
        download, dtype = table.get("download") or {}, next(iter(files.values()))[0].dtype
        # `torch_dtype` is the key of transformers 4 and 5.
        write_json(to / "config.json", {**download.get("config", {}), **table["config"], "torch_dtype": dtype.name})
        if directory := download.get("directory"):
            _copy_companions(Path(directory), to, out)


def _copy_companions(directory: Path, to: Path, out: Path) -> None:
    """Copy the tokenizer and generation files of a download. What cannot be copied is reported: weights matter more."""
    if not directory.is_dir():
        log_dist(f"{directory} is not there any more: copy its tokenizer and generation files to {out}", ranks=[0])
    for path in sorted({path for pattern in COMPANIONS for path in directory.glob(pattern)}):
        if (to / path.name).exists():
            continue
        target, is_directory = to / path.name, path.is_dir()
        try:
            (shutil.copytree if is_directory else shutil.copyfile)(path, target)
        except OSError as error:
            log_dist(f"{path} is not copied to {out}: {error.strerror or error}", ranks=[0])
            shutil.rmtree(target, ignore_errors=True) if is_directory else target.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
