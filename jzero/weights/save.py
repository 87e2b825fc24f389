"""The parameters of a running program as one file: `engine.save_16bit_model`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jzero.distributed import heartbeat
from jzero.distributed.host_collectives import anyone
from jzero.errors import ConfigError
from jzero.model import weights_layout
from jzero.weights.export import config_json, write_json
from jzero.weights.gather import gather
from jzero.weights.name_map import cast, leaves_of, tensors
from jzero.weights.tensor_writer import Writer, unwritable


def save(params: Any, step: Any, directory: str | os.PathLike, filename: str, dtype: np.dtype) -> None:
    """Write the parameters, the floating-point ones in `dtype`, to directory/filename: at any stage, on any mesh.

    All processes call it; process 0 writes. The file is there when it is whole. If the model has a `weights_layout`
    the names are those, and a directory without a config.json gets one. A layer at a time is gathered.

    Args:
      params, step: a state's parameters and their `TrainStep`.

    Raises:
      ConfigError: on all processes: a place that cannot be written, another kind of file, values beyond float16.
    """
    if Path(filename).name != filename or Path(filename).suffix != ".safetensors":
        raise ConfigError(f"save_filename = {filename!r}: must be a name that ends in .safetensors")
    directory = Path(directory)
    path, draft = directory / filename, directory / f"{filename}.tmp"
    table = weights_layout(step.model)
    some = cast(tensors(leaves_of(step.state_shapes.params), table), dtype)
    problem: str | None = None

    def on_first(do: Callable[..., Any], *arguments: Any) -> Any:
        """What process 0 does; after a problem nothing, but it goes on to gather, as the others do."""
        nonlocal problem
        if jax.process_index() or problem:
            return None
        try:
            return do(*arguments)
        except OSError as error:
            problem = str(unwritable(path, error))
        except ConfigError as error:
            problem = str(error)

    def begin() -> Writer:
        directory.mkdir(parents=True, exist_ok=True)
        return Writer({draft: some})

    def finish() -> None:
        writer.close()
        os.replace(draft, path)
        if table and not (directory / "config.json").exists():
            write_json(directory / "config.json", config_json(table, {filename: some}))

    try:
        writer = on_first(begin)
        if said := anyone("save_16bit_model", problem):
            raise ConfigError(said)
        heartbeat.begin()
        # The writer casts to float16, as it sees what is beyond its range; bfloat16 has float32's.
        for part in gather(params, step.layouts, step.mesh, None if dtype == np.float16 else dtype):
            on_first(lambda part: writer.write(*part), part)
        on_first(finish)
        heartbeat.finished_when(None)
        if said := anyone("save_16bit_model", problem):
            raise ConfigError(said)
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                draft.unlink()
