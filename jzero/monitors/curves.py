"""Curves: passes the metrics of each step to the writers, on process 0 and one step late."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jzero.config import Config
from jzero.distributed.host_collectives import together
from jzero.loss import LOSS
from jzero.monitors.writers import WRITERS, Writer, enabled

PREFIX = "Train/Samples/"  # of DeepSpeed's event names
SCALING = ("loss_scale", "skipped")  # only under fp16


class _Held(NamedTuple):
    """Values by event name, still on the devices; and where the run was."""

    values: Mapping[str, Any]
    samples: int
    step: int


class Curves:
    """Writes metrics where the config's monitors say.

    A step's metrics are written after the next step was started: reading them then waits for nothing that the devices
    still compute. A writer that fails is left out, with a warning; training goes on.
    """

    def __init__(self, config: Config):
        self._scaled = config.fp16.enabled
        self._held: list[_Held] = []
        sections = together("monitors", lambda: enabled(config))
        first = jax.process_index() == 0

        def start() -> dict[str, Writer]:
            return {section: WRITERS[section][0](getattr(config, section)) for section in sections if first}

        self._writers: dict[str, Writer] = together("monitors started", start) if sections else {}
        if self._writers:
            atexit.register(self.close)

    def step(self, metrics: Mapping[str, Any], samples: int, step: int) -> None:
        """Take the metrics of a step that may still run, and write those of the steps before it."""
        self.flush()
        self._hold({_name(key): x for key, x in metrics.items() if self._scaled or key not in SCALING}, samples, step)

    def evaluation(self, metrics: Mapping[str, Any], samples: int, step: int) -> None:
        """Take the loss and metrics of an evaluation."""
        self._hold({f"{PREFIX}eval_{key}": x for key, x in metrics.items()}, samples, step)

    def times(self, parts: Mapping[str, float], samples: int, step: int) -> None:
        """Take the milliseconds per step of each part of a step."""
        values = {"step": sum(parts.values()), **parts}
        self._hold({f"{PREFIX}elapsed_time_ms_{part}": x for part, x in values.items()}, samples, step)

    def _hold(self, values: Mapping[str, Any], samples: int, step: int) -> None:
        if self._writers:
            self._held.append(_Held(values, samples, step))

    def flush(self) -> None:
        """Write everything that was taken so far."""
        held, self._held = self._held, []
        for values, samples, step in held:
            numbers = {name: float(x) for name, x in values.items()}
            for section in list(self._writers):
                self._try(section, lambda w, n=numbers, x=samples, s=step: w.write(n, x, s))  # type: ignore[misc]

    def close(self) -> None:
        """Write the last step, and end the writers."""
        self.flush()
        for section in list(self._writers):
            self._try(section, lambda writer: writer.close())
        self._writers.clear()

    def _try(self, section: str, work: Any) -> None:
        try:
            work(self._writers[section])
        except Exception as error:  # a full disk or a lost connection must not end a run
            warnings.warn(
                f"{section}: no more curves from this run: {type(error).__name__}: {error}", RuntimeWarning, 2
            )
            del self._writers[section]


def _name(metric: str) -> str:
    return PREFIX + ("train_loss" if metric == LOSS else metric)
