"""What a row of the table of faults is, and ways to provoke a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jzero
from jzero.config import Config
from jzero.data import DataLoader
from jzero.launcher import options
from jzero.launcher.hostfile import read_hostfile
from jzero.launcher.job import make_job
from jzero.models.mlp import MLP, cross_entropy

Provoke = Callable[[Path], Any]


class Fault(NamedTuple):
    """A row.

    Attributes:
      fault: what is wrong, in words.
      outcome: what jzero does, in words.
      test: for a row without `provoke`, the name of the test of the fault.
      provoke: called with an empty folder: raises a ConfigError or a CheckpointError within a second of CPU time.
      parts: texts in the error's one line.
    """

    fault: str
    outcome: str
    test: str = ""
    provoke: Provoke | None = None
    parts: tuple[str, ...] = ()


def refused(fault: str, provoke: Provoke, *parts: str) -> Fault:
    """Make a row of an input that is refused within a second."""
    return Fault(fault, "one line, before anything starts", provoke=provoke, parts=parts)


def load(config: Any) -> Provoke:
    """Load a config from a dict or a path."""
    return lambda folder: Config.load(config)


def load_text(text: str) -> Provoke:
    """Load a config from a file with this text."""
    return lambda folder: Config.load(written(folder / "config.json", text.encode()))


def hosts(text: str) -> Provoke:
    """Read a hostfile with this text."""
    return lambda folder: read_hostfile(written(folder / "hosts", text.encode()))


def command(*words: str, **env: str) -> Provoke:
    """Plan a job with these options and variables."""
    parsed = [*words, "--no_python", "true"]
    return lambda folder: make_job(options.parse(parsed), {"PATH": "/bin:/usr/bin"} | env, str(folder))


def variables(content: bytes) -> Provoke:
    """Plan a job in a folder with this `.jzero_env`."""
    return lambda folder: command("--platform=cpu")(written(folder / ".jzero_env", content).parent)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def batches(size: int) -> Provoke:
    """Load batches of `size` from 16 rows."""

    def provoke(folder: Path) -> Any:
        model = jzero.from_flax(MLP, cross_entropy)
        config = {"train_batch_size": size, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
        return DataLoader((np.zeros((16, 784), np.float32), np.zeros(16, np.int32)), step)

    return provoke


def circle() -> dict[str, Any]:
    data: dict[str, Any] = {}
    data["a"] = data
    return data


def elsewhere(test: str, fault: str, outcome: str) -> Fault:
    """Make a row of a fault that another test provokes."""
    return Fault(fault, outcome, test=test)
