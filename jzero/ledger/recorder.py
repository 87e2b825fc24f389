"""Records what an engine does in the ledger of its run, on process 0."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from jzero import checkpoint
from jzero.checkpoint.directory import local_path
from jzero.checkpoint.lock import other_holder
from jzero.distributed import last_words, outages
from jzero.ledger import schema
from jzero.ledger.read import read
from jzero.ledger.writer import Later, Writer
from jzero.loss import SCALING
from jzero.profiling import compile_times
from jzero.profiling.device_memory import fullest_first
from jzero.train_step import TrainStep

WAITS = {"save": "checkpoint", "evaluation": "evaluation", "wait": "data"}  # field of a record -> part of the clock

_open: dict[Path, Recorder] = {}  # by home: a second engine of this process there takes the file over


class Follower(Protocol):
    """The engine's follower of results on the devices."""

    def give(self, results: Any, *then: Callable[[Any, float], None]) -> None:
        """Call `then` with the values once they are there, and with the time by `time.perf_counter`."""

    def settle(self, seconds: float | None = None) -> None:
        """Wait for all that was given, for a limited time."""


class Counted(Protocol):
    """The part of the engine that the records need."""

    step_fn: TrainStep
    global_steps: int
    global_samples: int
    training_dataloader: Any


class Recorder:
    """Writes the records of one engine; does nothing on other processes, and without a home.

    Args:
      step: the train step, for the facts about the run.
      resume: the directory of the run that this one continues; None: a new run, in the config's `checkpoint.dir`.
      began: when `initialize` was called, in UTC seconds; None: now.
      spent: {part: seconds} of the engine's clock, which goes on.
      follower: brings the metrics, and keeps the records in their order.
    """

    def __init__(
        self, step: TrainStep, resume: Path | None, began: float | None, spent: Mapping[str, float],
        follower: Follower,
    ):  # fmt: skip
        self._follower = follower
        self._writer: Writer | None = None
        self._scaled, self._spent = step.config.fp16.enabled, spent
        self._waited: dict[str, float] = {}  # field of WAITS -> seconds at the last record
        self._began, self._peak = began or time.time(), 0
        self._compiled = self._compiled_before = compile_times.seconds()  # at the begin of a step, and after the last
        self._step = self._samples = 0
        self._position: list[int] | None = None
        self._save = checkpoint.last_save()
        self._reason = ""
        named = step.config.checkpoint.dir
        home = resume or (local_path(named, "checkpoint.dir") if named else None)
        if home is None or jax.process_index() or (resume is None and other_holder(home)):
            return  # another job's records would mix with these
        if home in _open:
            _open[home].close()
        try:
            self._writer = Writer(home / schema.FILE, follower.settle)
        except OSError as error:  # training does not depend on it
            warnings.warn(f"{home / schema.FILE}: no records of this run: {error}", RuntimeWarning, 2)
            return
        _open[home], self._home = self, home
        self._start(step, resume is not None)

    # ------------------------------------------------------------------ events

    def _start(self, step: TrainStep, resumed: bool) -> None:
        """Write the failures before this start, and the start."""
        for outage in outages.read(os.environ):
            about = {
                "attempt": outage.attempt, "died": round(outage.died, 4), "code": outage.code, "reason": outage.reason
            }  # fmt: skip
            self._put(schema.FAILURE, about, at=outage.noticed)
        attempt = os.environ.get("JZERO_ATTEMPT", "")
        about = {
            "version": schema.VERSION, "began": self._began,
            "new": not resumed and not outages.read(os.environ), "attempt": attempt,
            "processes": jax.process_count(), "devices": step.mesh.devices.size,
            "device": step.mesh.devices.flat[0].device_kind, "mesh": dict(step.mesh.shape),
            "versions": _versions(), "precision": step.config.precision,
        }  # fmt: skip
        self._put(schema.START, about)

    def state(self, run: Counted, origin: str | os.PathLike | None = None) -> None:
        """Record that steps continue from here. What was compiled for the state is part of its time.

        Args:
          origin: the checkpoint or the weights that the state is from.
        """
        loader = run.training_dataloader
        self._position, self._samples = _position(loader), run.global_samples
        self._step, self._compiled_before = run.global_steps, compile_times.seconds()
        self._waits()
        about = {
            "step": run.global_steps, "samples": run.global_samples, "from": None if origin is None else str(origin),
            "data": self._position, "order": None if loader is None else loader.order,
        }  # fmt: skip
        self._put(schema.STATE, about)

    def begin(self) -> None:
        """Note that a step is given to the devices now."""
        self._began, self._compiled = time.time(), compile_times.seconds()

    def step(self, run: Counted, last: bool) -> Callable[[Mapping[str, float], float], None]:
        """Return what records a step once its metrics are known; `last`: SIGTERM ends the run after it."""
        if self._writer is None:
            return lambda metrics, end: None
        self._reason = "SIGTERM" if last else ""
        before, self._position = self._position, _position(run.training_dataloader)
        rows, self._samples, self._step = run.global_samples - self._samples, run.global_samples, run.global_steps
        about: dict[str, Any] = {
            "step": run.global_steps, "samples": run.global_samples, "rows": rows, "began": round(self._began, 4)
        }  # fmt: skip
        if tokens := run.step_fn.amount.tokens:
            about["tokens"] = tokens
        if before != self._position:
            about["data"] = [before, self._position]
        compiled = compile_times.seconds()
        seconds = self._waits() | {
            "compile_before": self._compiled - self._compiled_before,
            "compile": min(compiled - self._compiled, time.time() - self._began),  # other threads may compile too
        }  # fmt: skip
        self._compiled_before = compiled
        about |= {field: round(x, 4) for field, x in seconds.items() if x > 5e-5}

        def record(metrics: Mapping[str, float], end: float) -> None:
            kept = {name: x for name, x in metrics.items() if self._scaled or name not in SCALING}
            memory = {"peak": peak} if (peak := self._new_peak()) else {}
            self._write(schema.STEP, about | {"metrics": kept} | memory, _utc(end))

        return record

    def notice(self, step: int, what: str, text: str) -> None:
        """Record what a check found about a step."""
        self._put(schema.NOTICE, {"step": step, "what": what, "text": text})

    def evaluation(self, run: Counted, metrics: Mapping[str, Any], began: float) -> None:
        """Record an evaluation that may still run and `began` at a time in UTC seconds."""
        about = {"step": run.global_steps, "samples": run.global_samples, "began": round(began, 4)}

        def record(values: Mapping[str, Any], end: float) -> None:
            self._write(schema.EVALUATION, about | {"metrics": {k: float(x) for k, x in values.items()}}, _utc(end))

        if self._writer is not None:
            self._follower.give(dict(metrics), record)

    def _waits(self) -> dict[str, float]:
        """Return the seconds of each field of WAITS since the last call."""
        before, self._waited = self._waited, {field: self._spent.get(part, 0.0) for field, part in WAITS.items()}
        return {field: x - before.get(field, 0.0) for field, x in self._waited.items()}

    def saved(self) -> checkpoint.Save | None:
        """Record the last save once it ends, if it is a new one; return it."""
        save, before = checkpoint.last_save(), self._save
        if save is not None and save is not before:
            self._save = save
            self._record_save(save, self._step)
        return save

    def _record_save(self, save: checkpoint.Save, step: int) -> None:

        def make() -> dict[str, Any]:
            about = {
                "tag": save.path.name, "directory": str(save.path.parent), "step": step,
                "began": round(save.began, 4), "stall": round(save.stall, 4),
                "background": round(save.background, 4), "bytes": save.bytes, "error": save.error,
            }  # fmt: skip
            return _record(schema.SAVE, about, save.ended)

        if self._writer is not None:
            self._writer.put_save(Later(lambda: save.done, make))

    def goodput(self) -> str:
        """Return the line about the goodput of the whole run; "" without a ledger."""
        return "" if self._writer is None else str(read(self._home).goodput)

    def close(self) -> None:
        """Record the end, and close the file."""
        if self._writer is not None:
            self._follower.settle()
            self._write(schema.END, {"step": self._step, "reason": self._reason or last_words.ended_by()}, time.time())
            self._writer.close()
            self._writer = None
            _open.pop(self._home, None)

    # ------------------------------------------------------------------ records

    def _put(self, kind: str, about: Mapping[str, Any], at: float | None = None) -> None:
        """Write a record after those of the steps so far."""
        at = time.time() if at is None else at
        if self._writer is not None:
            self._follower.give(None, lambda values, end: self._write(kind, about, at))

    def _write(self, kind: str, about: Mapping[str, Any], at: float) -> None:
        writer = self._writer  # the script's thread may close it
        if writer is not None:
            writer.put(_record(kind, about, at))

    def _new_peak(self) -> int:
        """Return the peak of memory in use on the fullest device of this process; 0 if it has not grown."""
        peak = next((found["peak_bytes_in_use"] for _, found in fullest_first()), 0)
        grown, self._peak = peak > self._peak, max(peak, self._peak)
        return peak if grown else 0


def _record(kind: str, about: Mapping[str, Any], at: float) -> dict[str, Any]:
    return {"kind": kind, "time": round(at, 4), **about}


def _utc(end: float) -> float:
    """Return a time by `time.perf_counter` in UTC seconds."""
    return time.time() - (time.perf_counter() - end)


def _versions() -> dict[str, str]:
    """Return the versions of the installed packages that decide what a step computes."""
    found = {}
    for name in ("jzero", "jax", "jaxlib"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _position(loader: Any) -> list[int] | None:
    """Return the position of a DataLoader as a list; None without one."""
    return None if loader is None else list(loader.position.values())
