"""Writes the parameters of a running program to one file: `engine.save_16bit_model`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.display.slow_work import slow_work
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import run_on_all
from jzero.errors import ConfigError
from jzero.layout.sharding import ParamLayout
from jzero.mesh import PIPE
from jzero.model import weights_layout
from jzero.tree import PyTree
from jzero.weights.adapters import ADAPTER_FILE, Merge, check_alone, declared, trained_beside
from jzero.weights.export import write_configs, writing
from jzero.weights.load import file_names
from jzero.weights.name_map import Box, dotted, leaves_of, tensors, with_dtype
from jzero.weights.safetensors import TensorWriter

Part = tuple[str, Box, np.ndarray]  # of a leaf: its dotted name, the box, the values

if TYPE_CHECKING:
    from jzero.step.train_step import TrainStep


@slow_work("writing the parameters")
def save(
    params: PyTree, step: TrainStep, directory: str | os.PathLike, filename: str, dtype: np.dtype,
    *, adapters: bool = False,
) -> None:  # fmt: skip
    """Write the parameters to directory/filename, for any ZeRO stage and mesh.

    All processes call it and process 0 writes. Layers are gathered one at a time. The file appears once it is complete.
    If the model has a `weights_layout`, the tensors have its names, adapters are merged into their matrices, and a
    directory without config.json gets one, with the tokenizer and generation files of the model's download.

    Args:
      params: of a state.
      step: its `TrainStep`.
      directory: made if it does not exist.
      filename: must end with .safetensors.
      dtype: of the floating-point tensors, but for those that the table calls state.
      adapters: write the adapters alone, with their adapter_config.json.

    Raises:
      ConfigError: the file cannot be written, has another suffix, or a value overflows float16; no adapters, or other
        parameters are trained besides them. Raised on all processes.
    """
    if Path(filename).name != filename or Path(filename).suffix != ".safetensors":
        raise ConfigError(f"save_filename = {filename!r}: must be a name that ends in .safetensors")
    directory = Path(directory)
    path, draft = directory / filename, directory / f"{filename}.tmp"
    table, in_files = weights_layout(step.model), [dotted(name) for name in file_names(step).values()]
    leaves = dict(zip(in_files, leaves_of(step.state_shapes.params).values(), strict=True))
    wanted = declared(table) if adapters else leaves
    if adapters:
        check_alone(trained_beside(table, step.layouts), "engine.save_16bit_model")
    some = with_dtype(tensors(leaves, table, adapters=adapters), dtype)
    merge = Merge(leaves, None if adapters else table)
    by_name = dict(zip(in_files, zip(jax.tree.leaves(step.layouts), jax.tree.leaves(params), strict=True), strict=True))
    # A cast on the device would turn large values into infinities without an error, so the writer casts to float16.
    # bfloat16 has the range of float32. What is merged is rounded once, after the sum.
    whole = dtype == np.float16 or merge.arrays
    parts = gather_params({name: by_name[name] for name in merge.ordered(wanted)}, step.mesh, None if whole else dtype)

    def begin() -> TensorWriter:
        directory.mkdir(parents=True, exist_ok=True)
        return TensorWriter({draft: some}, merge)

    def finish() -> None:
        os.replace(draft, path)
        write_configs(table, {filename: some}, directory, directory, adapters)

    try:
        with heartbeat.work():
            _write_on_process_0(path, parts, begin, finish)
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                draft.unlink()


def _write_on_process_0(
    path: Path, parts: Iterator[Part], begin: Callable[[], TensorWriter], finish: Callable[[], None]
) -> None:
    """Write parts, which all processes gather together; an error on process 0 is one on all.

    Args:
      path: of the file, for errors.
    """

    def create() -> TensorWriter | None:
        with writing(path):
            return None if jax.process_index() else begin()

    def write() -> None:
        try:
            with writing(path):
                if writer:
                    for part in parts:
                        writer.write(*part)
                    writer.close()
                    finish()
        finally:
            for _ in parts:  # every gather is a collective, for which the others wait after an error here too
                pass

    writer = run_on_all("save_16bit_model", create)
    run_on_all("save_16bit_model", write)


def save_adapters(params: PyTree, step: TrainStep, directory: str | os.PathLike) -> None:
    """Write the adapters alone, in peft's format and the dtype of the masters; see `save`."""
    save(params, step, directory, ADAPTER_FILE, np.dtype(step.precision.master), adapters=True)


def gather_params(
    params: Mapping[str, tuple[ParamLayout, jax.Array]], mesh: Mesh, dtype: np.dtype | None
) -> Iterator[Part]:
    """Yield (name, box, values) for all parameters; a stacked leaf comes one layer at a time.

    All processes must exhaust the iterator, because every gather is a collective. Device memory: one layer, gathered on
    every device.

    Args:
      params: by dotted name.
      mesh: of the parameters.
      dtype: for floating-point parameters, cast before the gather so that fewer bytes move; None and state keep theirs.
    """
    for name, (leaf, x) in params.items():
        to = x.dtype if dtype is None or leaf.state or not jnp.issubdtype(x.dtype, jnp.floating) else dtype
        part = _part(leaf, mesh, to)
        for i in range(leaf.shape[0] if leaf.stacked else 1):
            values = np.asarray(part(x, jnp.int32(i)).addressable_data(0))
            box = tuple(slice(0, n) for n in leaf.shape)
            yield name, (slice(i, i + 1), *box[1:]) if leaf.stacked else box, values


def _part(leaf: ParamLayout, mesh: Mesh, dtype: np.dtype) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Compile the function that gathers layer i of a leaf [1, ...], or the whole leaf if it is not stacked."""

    def layer(x: jax.Array, i: jax.Array) -> jax.Array:
        if not leaf.stacked:
            return x.astype(dtype)
        i = i - lax.axis_index(PIPE) * len(x) if leaf.on_pipe else i
        here = lax.dynamic_slice_in_dim(x, jnp.clip(i, 0, len(x) - 1), 1).astype(dtype)
        if not leaf.on_pipe:
            return here
        # Only the stage that has layer i contributes. A select drops the others' values, because 0 * NaN is NaN.
        return lax.psum(jnp.where((i >= 0) & (i < len(x)), here, jnp.zeros_like(here)), PIPE)

    spec = PartitionSpec(None, *leaf.spec[1:]) if leaf.stacked else leaf.spec
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(leaf.spec, PartitionSpec()), out_specs=spec, check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))
