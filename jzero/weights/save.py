"""Writes the parameters of a running program to one file: `engine.save_16bit_model`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jzero.display.slow_work import slow_work
from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import anyone
from jzero.errors import ConfigError
from jzero.model import weights_layout
from jzero.tree import PyTree
from jzero.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Merge, check_alone, declared, trained_beside
from jzero.weights.export import config_json, write_json
from jzero.weights.gather import gather
from jzero.weights.load import file_names
from jzero.weights.name_map import Box, dotted, leaves_of, tensors, with_dtype
from jzero.weights.tensor_writer import TensorWriter, unwritable

if TYPE_CHECKING:
    from jzero.train_step import TrainStep


@slow_work("writing the parameters")
def save(
    params: PyTree, step: TrainStep, directory: str | os.PathLike, filename: str, dtype: np.dtype,
    *, adapters: bool = False,
) -> None:  # fmt: skip
    """Write the parameters to directory/filename, for any ZeRO stage and mesh.

    All processes call it and process 0 writes. Layers are gathered one at a time. The file appears once it is complete.
    If the model has a `weights_layout`, the tensors have its names, adapters are merged into their matrices, and a
    directory without config.json gets one.

    Args:
      params: of a state.
      step: its `TrainStep`.
      directory: made if it does not exist.
      filename: must end with .safetensors.
      dtype: of the floating-point tensors.
      adapters: write the adapters alone, with their adapter_config.json.

    Raises:
      ConfigError: the file cannot be written, has another suffix, or a value overflows float16; no adapters, or other
        parameters are trained beside them. Raised on all processes.
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
    problem: str | None = None

    def on_process_0(do: Callable[..., Any], *arguments: Any) -> Any:
        """Run `do` on process 0, unless it failed before. A failed process 0 still joins the gathers of the others."""
        nonlocal problem
        if jax.process_index() or problem:
            return None
        try:
            return do(*arguments)
        except OSError as error:
            problem = str(unwritable(path, error))
        except ConfigError as error:
            problem = str(error)

    def begin() -> TensorWriter:
        directory.mkdir(parents=True, exist_ok=True)
        return TensorWriter({draft: some})

    def finish() -> None:
        writer.close()
        os.replace(draft, path)
        if adapters and table:
            write_json(directory / ADAPTER_CONFIG, table["adapters"]["config"])
        elif table and not (directory / "config.json").exists():
            write_json(directory / "config.json", config_json(table, {filename: some}))

    def write(leaf: str, box: Box, values: np.ndarray) -> None:
        for part in merge(leaf, box, values):
            writer.write(leaf, *part)

    own = [replace(layout, name=name) for layout, name in zip(jax.tree.leaves(step.layouts), in_files, strict=True)]
    pairs = {layout.name: (layout, x) for layout, x in zip(own, jax.tree.leaves(params), strict=True)}
    layouts, arrays = zip(*(pairs[name] for name in merge.ordered(wanted)), strict=True)
    try:
        writer = on_process_0(begin)
        if error := anyone("save_16bit_model", problem):
            raise ConfigError(error)
        with heartbeat.work():
            # A cast on the device would turn large values into infinities without an error, so the writer casts to
            # float16. bfloat16 has the range of float32. What is merged is rounded once, after the sum.
            whole = dtype == np.float16 or merge.arrays
            for part in gather(arrays, layouts, step.mesh, None if whole else dtype):
                on_process_0(write, *part)
            on_process_0(finish)
        if error := anyone("save_16bit_model", problem):
            raise ConfigError(error)
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                draft.unlink()


def save_adapters(params: PyTree, step: TrainStep, directory: str | os.PathLike) -> None:
    """Write the adapters alone, in peft's format and the dtype of the masters; see `save`."""
    save(params, step, directory, ADAPTER_FILE, np.dtype(step.precision.master), adapters=True)
