"""The events of a run: one typed record for each thing that happens. `engine.on(StepEnded, function)` observes one.

A step and an evaluation have two events: devices are given them, and later they have ended. Arrays of metrics become
floats once, between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jzero.checkpoint import Save


class Moment(NamedTuple):
    """A time by `time.perf_counter`, and {part of the engine's clock: seconds} up to it."""

    time: float
    spent: Mapping[str, float]


class StateStarted(NamedTuple):
    """There is a state, and steps continue after it.

    Attributes:
      step, samples: of the state, since step 0.
      origin: a checkpoint, a directory of weights, "before step N" after a step that was not finite; None: a new state.
      data: the position in the training data; None without training data.
      order: what the position depends on, as `loader.order`.
      at: when.
    """

    step: int
    samples: int
    origin: str | None
    data: list[int] | None
    order: Mapping[str, Any] | None
    at: Moment


class StepGiven(NamedTuple):
    """The devices were given a step, and `engine.state` is the state after it.

    Attributes:
      step, samples: since step 0, with this one.
      rows, tokens: of this step; tokens is None where the batch has no text.
      metrics: {name: array}, as `engine.metrics`: a read waits for the devices.
      skipped: the steps so far that changed nothing; an array.
      data: the position in the training data after the step; None without training data.
      length: of the sequences of a curriculum; None without one.
      last: whether SIGTERM ends the run after this step.
      began, at: when the call began, and when all was given.
    """

    step: int
    samples: int
    rows: int
    tokens: int | None
    metrics: Mapping[str, jax.Array]
    skipped: jax.Array
    data: list[int] | None
    length: int | None
    last: bool
    began: Moment
    at: Moment


class StepEnded(NamedTuple):
    """The devices have finished a step.

    Attributes:
      given: the event when they were given it.
      metrics: {name: value}.
      skipped: the steps so far that changed nothing.
      end: when it was finished, by `time.perf_counter`.
      has_line: whether a progress line is due.
      parts: {part of the clock: milliseconds per step} since the last progress line, if this step has one under
        `wall_clock_breakdown`; else empty.
    """

    given: StepGiven
    metrics: Mapping[str, float]
    skipped: int
    end: float
    has_line: bool
    parts: Mapping[str, float]

    @property
    def step(self) -> int:
        return self.given.step

    @property
    def samples(self) -> int:
        return self.given.samples


class EvaluationGiven(NamedTuple):
    """The devices were given an evaluation after a step; `metrics` are arrays, as `engine.eval_metrics`."""

    step: int
    samples: int
    metrics: Mapping[str, jax.Array]
    began: Moment


class EvaluationEnded(NamedTuple):
    """The devices have finished an evaluation; `end` is by `time.perf_counter`."""

    step: int
    samples: int
    metrics: Mapping[str, float]
    began: Moment
    end: float


class SaveBegan(NamedTuple):
    """A save of the state after a step has begun; its files are written while training goes on."""

    step: int
    save: Save


class SaveEnded(NamedTuple):
    """The files of a save are complete, or `save.error` says why not. The engine sees it in its next call."""

    step: int
    save: Save


class Noticed(NamedTuple):
    """A check has found something about a step.

    Attributes:
      what: "not finite", "spike", "replicas differ", "straggler".
      text: the finding in words.
      raised: whether an exception says it, so that no line does.
    """

    step: int
    what: str
    text: str
    raised: bool = False


class RunEnded(NamedTuple):
    """The run ends: the engine is deleted, or the program ends; `reason` is its exception, "" in order."""

    reason: str


# Those that `engine.on` takes: at a run's end there may be no engine that calls a function.
EVENTS = (StateStarted, StepGiven, StepEnded, EvaluationGiven, EvaluationEnded, SaveBegan, SaveEnded, Noticed)
Event = (
    StateStarted
    | StepGiven
    | StepEnded
    | EvaluationGiven
    | EvaluationEnded
    | SaveBegan
    | SaveEnded
    | Noticed
    | RunEnded
)
