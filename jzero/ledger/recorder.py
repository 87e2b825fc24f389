"""Records what an engine does in the ledger of its run, on process 0."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jzero import checkpoint
from jzero.checkpoint.directory import local_path
from jzero.checkpoint.lock import other_holder
from jzero.distributed import last_words
from jzero.distributed.machine import fullest_first
from jzero.events import EvaluationEnded, Event, Noticed, RunEnded, SaveBegan, StateStarted, StepEnded
from jzero.ledger import schema
from jzero.ledger.read import read
from jzero.ledger.writer import Later, RecordWriter
from jzero.loss import SCALING
from jzero.step.train_step import TrainStep

# Field of a step's record -> the part of the clock in which the devices waited before it.
WAITS = {"save": "checkpoint", "evaluation": "evaluation", "wait": "data"}
COMPILE = "compile"

TAKEOVER_TIMEOUT = 10.0  # seconds to wait for the steps of an engine whose file another one takes over
_open: dict[Path, Recorder] = {}  # by home: a second engine of this process there takes the file over


class Recorder:
    """Writes the records of one engine; does nothing on other processes, and without a home.

    Args:
      step: the train step, for the facts about the run.
      resume: the directory of the run that this one continues; None: a new run, in the config's `checkpoint.dir`.
      began: when `initialize` was called, in UTC seconds; None: now.
      settle: waits a number of seconds for the events that are on their way.
    """

    def __init__(self, step: TrainStep, resume: Path | None, began: float | None, settle: Callable[[float], None]):
        self._writer: RecordWriter | None = None
        self._settle = settle
        self._scaled, self._peak = step.config.fp16.enabled, 0
        self._step, self._reason = 0, ""
        self._position: list[int] | None = None
        self._spent: Mapping[str, float] = {}  # the clock at the last record of a state or a step
        named = step.config.checkpoint.dir
        home = resume or (local_path(named, "checkpoint.dir") if named else None)
        if home is None or jax.process_index() or (resume is None and other_holder(home)):
            return  # another job's records would mix with these
        if home in _open:
            _open[home].close()
        try:
            self._writer = RecordWriter(home / schema.FILE, settle)
        except OSError as error:  # training does not depend on it
            warnings.warn(f"{home / schema.FILE}: no records of this run: {error}", RuntimeWarning, 2)
            return
        _open[home], self._home = self, home
        self._start(step, began or time.time(), resume is not None)

    def _start(self, step: TrainStep, began: float, resumed: bool) -> None:
        """Write the failures before this start, and the start."""
        outages = last_words.read_outages(os.environ)
        for outage in outages:
            about = {
                "attempt": outage.attempt, "died": round(outage.died, 4), "code": outage.code, "reason": outage.reason
            }  # fmt: skip
            self._write(schema.FAILURE, about, outage.noticed)
        about = {
            "version": schema.VERSION, "began": began, "new": not resumed and not outages,
            "attempt": os.environ.get("JZERO_ATTEMPT", ""), "processes": jax.process_count(),
            "devices": step.mesh.devices.size, "device": step.mesh.devices.flat[0].device_kind,
            "mesh": dict(step.mesh.shape), "versions": _versions(), "precision": step.config.precision,
        }  # fmt: skip
        self._write(schema.START, about, time.time())

    def close(self) -> None:
        """Write what is on its way, and the end."""
        self._settle(TAKEOVER_TIMEOUT)
        self.on(RunEnded(last_words.ended_by()))

    def on(self, event: Event) -> None:
        """Write the record of an event."""
        if self._writer is None:
            return
        match event:
            case StateStarted():
                self._state(event)
            case StepEnded():
                self._steps(event)
            case EvaluationEnded(step, samples, metrics, began, end):
                about = {"step": step, "samples": samples, "began": _utc(began.time), "metrics": metrics}
                self._write(schema.EVALUATION, about, _utc(end))
            case SaveBegan(step, save):
                self._writer.put_save(Later(lambda: save.done, partial(_record_of_save, save, step)))
            case Noticed(step, what, text):
                self._write(schema.NOTICE, {"step": step, "what": what, "text": text}, time.time())
            case RunEnded(reason):
                self._write(schema.END, {"step": self._step, "reason": self._reason or reason}, time.time())
                self._writer.close()
                self._writer = None
                _open.pop(self._home, None)

    def _state(self, event: StateStarted) -> None:
        """Record that steps continue from here. What was compiled for the state is part of its time."""
        self._step, self._position, self._spent = event.step, event.data, event.at.spent
        about = {
            "step": event.step, "samples": event.samples, "from": event.origin, "data": event.data, "order": event.order
        }  # fmt: skip
        self._write(schema.STATE, about, _utc(event.at.time))

    def _steps(self, event: StepEnded) -> None:
        given, before, self._step = event.given, self._position, event.step
        self._position, self._reason = given.data, "SIGTERM" if given.last else ""
        about: dict[str, Any] = {
            "step": event.step, "samples": event.samples, "rows": given.rows, "began": _utc(given.began.time)
        }  # fmt: skip
        if given.tokens:
            about["tokens"] = given.tokens
        if before != given.data:
            about["data"] = [before, given.data]
        earlier, began, self._spent = self._spent, given.began.spent, given.at.spent
        seconds = {field: _grown(part, earlier, given.at.spent) for field, part in WAITS.items()}
        seconds["compile_before"] = _grown(COMPILE, earlier, began)
        seconds["compile"] = _grown(COMPILE, began, given.at.spent)
        about |= {field: round(x, 4) for field, x in seconds.items() if x > 5e-5}
        about["metrics"] = {name: x for name, x in event.metrics.items() if self._scaled or name not in SCALING}
        if peak := self._new_peak():
            about["peak"] = peak
        self._write(schema.STEP, about, _utc(event.end))

    def _write(self, kind: str, about: Mapping[str, Any], at: float) -> None:
        writer = self._writer  # the script's thread may close it
        if writer is not None:
            writer.put(_record(kind, about, at))

    def _new_peak(self) -> int:
        """Return the peak of memory in use on the fullest device of this process; 0 if it has not grown."""
        peak = next((found["peak_bytes_in_use"] for _, found in fullest_first()), 0)
        grown, self._peak = peak > self._peak, max(peak, self._peak)
        return peak if grown else 0

    def goodput(self) -> str:
        """Return the line about the goodput of the whole run; "" without a ledger."""
        return "" if self._writer is None else str(read(self._home).goodput)


def _grown(part: str, since: Mapping[str, float], until: Mapping[str, float]) -> float:
    """Return the seconds of a part of the clock between two moments."""
    return until.get(part, 0.0) - since.get(part, 0.0)


def _record(kind: str, about: Mapping[str, Any], at: float) -> dict[str, Any]:
    return {"kind": kind, "time": round(at, 4), **about}


def _record_of_save(save: checkpoint.Save, step: int) -> dict[str, Any]:
    about = {
        "tag": save.path.name, "directory": str(save.path.parent), "step": step,
        "began": round(save.began, 4), "stall": round(save.stall, 4),
        "background": round(save.background, 4), "bytes": save.bytes, "error": save.error,
    }  # fmt: skip
    return _record(schema.SAVE, about, save.ended)


def _utc(end: float) -> float:
    """Return a time by `time.perf_counter` in UTC seconds."""
    return round(time.time() - (time.perf_counter() - end), 4)


def _versions() -> dict[str, str]:
    """Return the versions of the installed packages that decide what a step computes."""
    found = {}
    for name in ("jzero", "jax", "jaxlib"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
