"""What a row of the table of faults is, and ways to provoke a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A row.

    Attributes:
      fault: what is wrong, in words.
      outcome: what jzero does, in words.
      provoke: called with an empty folder: raises a ConfigError or a CheckpointError.
      seconds: the bound of `provoke`, in seconds of CPU time.
      parts: texts in the error's one line.
      test: for a row without `provoke`, the test of the fault, "FILE.py::NAME".
    """

    fault: str
    outcome: str
    provoke: Callable[[Path], Any] | None = None
    seconds: float = 1
    parts: tuple[str, ...] = ()
    test: str = ""


def refused(fault: str, provoke: Callable[[Path], Any], *parts: str, outcome: str = "") -> Fault:
    """Make a row of an input that is refused within a second."""
    return Fault(fault, outcome or "one line, before anything starts", provoke, parts=parts)


def load(config: Any) -> Callable[[Path], Any]:
    """Load a config from a dict or a path."""

    def provoke(folder: Path) -> Any:
        from jzero.config import Config

        return Config.load(config)

    return provoke


def load_text(text: str) -> Callable[[Path], Any]:
    """Load a config from a file with this text."""

    def provoke(folder: Path) -> Any:
        from jzero.config import Config

        (folder / "config.json").write_text(text)
        return Config.load(folder / "config.json")

    return provoke


def hosts(text: str) -> Callable[[Path], Any]:
    """Read a hostfile with this text."""

    def provoke(folder: Path) -> Any:
        from jzero.launcher.hostfile import read_hostfile

        (folder / "hosts").write_text(text)
        return read_hostfile(folder / "hosts")

    return provoke


def command(*words: str, **env: str) -> Callable[[Path], Any]:
    """Plan a job with these options and variables."""

    def provoke(folder: Path) -> Any:
        from jzero.launcher import options
        from jzero.launcher.job import make_job

        return make_job(options.parse([*words, "--no_python", "true"]), {"PATH": "/bin:/usr/bin"} | env, str(folder))

    return provoke


def variables(content: bytes) -> Callable[[Path], Any]:
    """Plan a job in a folder with this `.jzero_env`."""

    def provoke(folder: Path) -> Any:
        (folder / ".jzero_env").write_bytes(content)
        return command("--platform=cpu")(folder)

    return provoke


def batches(size: int) -> Callable[[Path], Any]:
    """Load batches of `size` from 16 rows."""

    def provoke(folder: Path) -> Any:
        import jax
        import numpy as np

        import jzero
        from jzero.data import DataLoader
        from models.mlp import MLP, cross_entropy

        model = jzero.from_flax(MLP, cross_entropy)
        config = {"train_batch_size": size, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:1]))
        return DataLoader((np.zeros((16, 784), np.float32), np.zeros(16, np.int32)), step)

    return provoke


def nested(levels: int) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for _ in range(levels):
        data = {"a": data}
    return data


def circle() -> dict[str, Any]:
    data: dict[str, Any] = {}
    data["a"] = data
    return data


def elsewhere(test: str, fault: str, outcome: str) -> Fault:
    """Make a row of a fault that another test provokes."""
    return Fault(fault, outcome, test=test)
