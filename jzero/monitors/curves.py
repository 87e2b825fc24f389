"""Curves: passes the metrics of each step to the writers, on process 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jzero.config import Config
from jzero.distributed.host_collectives import together
from jzero.errors import ConfigError
from jzero.loss import LOSS, SCALING
from jzero.monitors.writers import WRITERS, Writer, enabled, place

PREFIX = "Train/Samples/"  # of DeepSpeed's event names


class Curves:
    """Writes metrics where the config's monitors say.

    A writer that fails is left out, with a warning; training goes on.
    """

    def __init__(self, config: Config):
        self._config, self._scaled = config, config.fp16.enabled
        self._sections = sections = together("monitors", lambda: enabled(config))
        first = jax.process_index() == 0

        def start() -> dict[str, Writer]:
            return {section: _start(section, config) for section in sections if first}

        self._writers: dict[str, Writer] = together("monitors started", start) if sections else {}

    @property
    def places(self) -> dict[str, str]:
        """{"curves": the directories and services that the config names}; {} without monitors."""
        where = {place(section, self._config): None for section in self._sections}
        return {"curves": ", ".join(where)} if where else {}

    def step(self, metrics: Mapping[str, Any], samples: int, step: int) -> None:
        """Write the metrics of a step."""
        self._write({_name(key): x for key, x in metrics.items() if self._scaled or key not in SCALING}, samples, step)

    def evaluation(self, metrics: Mapping[str, Any], samples: int, step: int) -> None:
        """Write the loss and metrics of an evaluation."""
        self._write({f"{PREFIX}eval_{key}": x for key, x in metrics.items()}, samples, step)

    def times(self, parts: Mapping[str, float], samples: int, step: int) -> None:
        """Write the milliseconds per step of each part of a step."""
        values = {"step": sum(parts.values()), **parts}
        self._write({f"{PREFIX}elapsed_time_ms_{part}": x for part, x in values.items()}, samples, step)

    def _write(self, values: Mapping[str, Any], samples: int, step: int) -> None:
        numbers = {name: float(x) for name, x in values.items()}
        for section in list(self._writers):
            self._try(section, lambda writer: writer.write(numbers, samples, step))

    def close(self) -> None:
        """End the writers."""
        for section in list(self._writers):
            self._try(section, lambda writer: writer.close())
        self._writers.clear()

    def _try(self, section: str, work: Callable) -> None:
        try:
            work(self._writers[section])
        except Exception as error:  # a full disk or a lost connection must not end a run
            warnings.warn(
                f"{section}: no more curves from this run: {type(error).__name__}: {error}", RuntimeWarning, 2
            )
            self._writers.pop(section, None)


def _start(section: str, config: Config) -> Writer:
    """Start one writer.

    Raises:
      ConfigError: its directory cannot be written, or its service refuses it, whatever the service raises.
    """
    try:
        return WRITERS[section][0](getattr(config, section))
    except Exception as error:
        raise ConfigError(f"{section}: {type(error).__name__}: {error}") from error


def _name(metric: str) -> str:
    return PREFIX + ("train_loss" if metric == LOSS else metric)
