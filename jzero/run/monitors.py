"""Monitors: the curves of a run in files and services, with DeepSpeed's sections, event names and file layout."""

from __future__ import annotations

import csv
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import jax

from jzero.config import Config
from jzero.config.observed import CometConfig, FilesConfig, WandbConfig
from jzero.distributed.host_collectives import run_on_all
from jzero.errors import ConfigError, install_command, with_type
from jzero.events import EvaluationEnded, Event, RunEnded, StepEnded
from jzero.files import append
from jzero.loss import LOSS, SCALING
from jzero.values.json_lines import encode


class CurveWriter(Protocol):
    """A destination of curves."""

    def write(self, values: Mapping[str, float], samples: int, step: int) -> None:
        """Write values by event name; `samples` is the x of DeepSpeed's curves."""

    def close(self) -> None:
        """Write what is buffered, and end."""


class CsvFiles:
    """A file per event with the header `step,<last part of the name>`; its "step" is the number of samples."""

    def __init__(self, config: FilesConfig):
        self._directory = _directory(config)
        self._files: dict[str, TextIO] = {}  # kept open: opening is slow on network disks

    def write(self, values: Mapping[str, float], samples: int, step: int) -> None:
        for name, value in values.items():
            if name not in self._files:
                path = self._directory / f"{name.replace('/', '_').replace(' ', '_')}.csv"
                self._files[name] = open(append(path), "a", buffering=1, newline="")  # noqa: SIM115
                if not self._files[name].tell():  # a resumed run continues the file
                    csv.writer(self._files[name], lineterminator="\n").writerow(["step", name.rpartition("/")[2]])
            csv.writer(self._files[name], lineterminator="\n").writerow([samples, value])

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class JsonLines:
    """One file, `metrics.jsonl`, with a JSON object per step, as `jzero.values.json_lines` writes it."""

    def __init__(self, config: FilesConfig):
        self._file = open(append(_directory(config) / "metrics.jsonl"), "a", buffering=1)  # noqa: SIM115

    def write(self, values: Mapping[str, float], samples: int, step: int) -> None:
        self._file.write(encode({"step": step, "samples": samples, **values}))

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard's event files, through tensorboardX, which writes from a thread."""

    def __init__(self, config: FilesConfig):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(_directory(config)))

    def write(self, values: Mapping[str, float], samples: int, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, config: WandbConfig):
        import wandb

        self._run = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(self, values: Mapping[str, float], samples: int, step: int) -> None:
        self._run.log(dict(values), step=samples)

    def close(self) -> None:
        self._run.finish()


class Comet:
    """An experiment of Comet; a value at most every `samples_log_interval` samples."""

    def __init__(self, config: CometConfig):
        import comet_ml

        self._experiment = comet_ml.start(
            api_key=config.api_key, project=config.project, workspace=config.workspace,
            experiment_key=config.experiment_key, mode=config.mode, online=config.online,
        )  # fmt: skip
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)
        self._every = config.samples_log_interval
        self._last: dict[str, int] = {}

    def write(self, values: Mapping[str, float], samples: int, step: int) -> None:
        due = {name: x for name, x in values.items() if samples - self._last.get(name, -self._every) >= self._every}
        self._last |= dict.fromkeys(due, samples)
        for name, value in due.items():
            self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        self._experiment.end()


# section -> (its writer, the package that it imports, the extra of jzero that installs it)
WRITERS: dict[str, tuple[Callable[[Any], CurveWriter], str, str]] = {
    "csv_monitor": (CsvFiles, "", ""),
    "jsonl_monitor": (JsonLines, "", ""),
    "tensorboard": (TensorBoard, "tensorboardX", "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb", "wandb"),
    "comet": (Comet, "comet_ml", "comet"),
}


def enabled(config: Config) -> list[str]:
    """Return the sections of the monitors that the config turns on.

    Raises:
      ConfigError: the package of one is missing.
    """
    sections = [section for section in WRITERS if getattr(config, section).enabled]
    for section in sections:
        _, package, extra = WRITERS[section]
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{section}.enabled = true: the package {package} is not installed; "
                f"{install_command(extra)}, or set it to false"
            )
    return sections


def _directory(config: FilesConfig) -> Path:
    """Make and return the directory of a run's files: output_path/job_name, as in DeepSpeed."""
    directory = Path(config.output_path, config.job_name).absolute()  # the program may go to another one
    directory.mkdir(parents=True, exist_ok=True)
    return directory


PREFIX = "Train/Samples/"  # of DeepSpeed's event names


class Curves:
    """Writes metrics where the config's monitors say.

    A writer that fails is left out, with a warning; training goes on.
    """

    def __init__(self, config: Config):
        self._scaled = config.fp16.enabled
        sections = run_on_all("monitors", lambda: enabled(config))
        asked = {section: getattr(config, section) for section in sections}
        where = dict.fromkeys(
            str(Path(one.output_path, one.job_name)) if isinstance(one, FilesConfig) else section
            for section, one in asked.items()
        )
        # {"curves": the directories and services that the config names}; {} without monitors
        self.places = {"curves": ", ".join(where)} if where else {}
        mine = sections if jax.process_index() == 0 else []
        self._writers: dict[str, CurveWriter] = {}
        if sections:
            self._writers = run_on_all("monitors started", lambda: {name: _start(name, config) for name in mine})

    def on(self, event: Event) -> None:
        """Write the metrics of a step or an evaluation, and the milliseconds of a step's parts; end with the run."""
        if isinstance(event, StepEnded):
            kept = {key: x for key, x in event.metrics.items() if self._scaled or key not in SCALING}
            self._write({"train_loss" if key == LOSS else key: x for key, x in kept.items()}, event)
            if event.parts:
                times = {"step": sum(event.parts.values()), **event.parts}
                self._write({f"elapsed_time_ms_{part}": x for part, x in times.items()}, event)
        elif isinstance(event, EvaluationEnded):
            self._write({f"eval_{key}": x for key, x in event.metrics.items()}, event)
        elif isinstance(event, RunEnded):
            for section in list(self._writers):
                self._try(section, lambda writer: writer.close())
            self._writers.clear()

    def _write(self, values: Mapping[str, float], event: StepEnded | EvaluationEnded) -> None:
        numbers = {f"{PREFIX}{name}": x for name, x in values.items()}
        for section in list(self._writers):
            self._try(section, lambda writer: writer.write(numbers, event.samples, event.step))

    def _try(self, section: str, work: Callable) -> None:
        try:
            work(self._writers[section])
        except Exception as error:  # a full disk or a lost connection must not end a run
            warnings.warn(f"{section}: no more curves from this run: {with_type(error)}", RuntimeWarning, 2)
            self._writers.pop(section, None)


def _start(section: str, config: Config) -> CurveWriter:
    """Start one writer.

    Raises:
      ConfigError: its directory cannot be written, or its service refuses it, whatever the service raises.
    """
    try:
        return WRITERS[section][0](getattr(config, section))
    except Exception as error:
        raise ConfigError(f"{section}: {type(error).__name__}: {error}") from error
