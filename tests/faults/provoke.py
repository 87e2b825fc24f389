"""What a row of the table of faults is, and ways to provoke a fault: functions of an empty folder."""

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


class Fault(NamedTuple):
    """A fault, and what jzero does; `test` provokes it, or `provoke`, whose error has these parts in its one line."""

    fault: str
    outcome: str
    test: str = ""
    provoke: Callable[[Path], Any] | None = None
    parts: tuple[str, ...] = ()


def refused(fault, provoke, *parts):
    return Fault(fault, "one line, before anything starts", provoke=provoke, parts=parts)


def elsewhere(test, fault, outcome):
    return Fault(fault, outcome, test=test)


def load(config):
    """Load a config from a dict or a path."""
    return lambda folder: Config.load(config)


def load_text(text):
    return lambda folder: Config.load(written(folder / "config.json", text.encode()))


def hosts(text):
    return lambda folder: read_hostfile(written(folder / "hosts", text.encode()))


def command(*words, **env):
    """Plan a job with these options and variables."""
    parsed = [*words, "--no_python", "true"]
    return lambda folder: make_job(options.parse(parsed), {"PATH": "/bin:/usr/bin"} | env, str(folder))


def variables(content):
    """Plan a job in a folder with this `.jzero_env`."""
    return lambda folder: command("--platform=cpu")(written(folder / ".jzero_env", content).parent)


def written(path, content):
    path.write_bytes(content)
    return path


def batches(size):
    """Load batches of `size` from 16 rows."""

    def provoke(folder):
        model = jzero.from_flax(MLP, cross_entropy)
        config = {"train_batch_size": size, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
        return DataLoader((np.zeros((16, 784), np.float32), np.zeros(16, np.int32)), step)

    return provoke


def circle():
    data = {}
    data["a"] = data
    return data
