"""The events of a run, as a user's functions get them, and the thread that waits for the devices, whatever fails."""

import gc
import json
import queue
import subprocess
import sys
import threading
import time
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import engine, parts, rows
from helpers.refusals import refuses
from helpers.regression import CONFIG, Regression

import jzero
from jzero import events
from jzero.run import result_waiter
from jzero.run.clock import DEVICE, EVALUATION
from jzero.run.result_waiter import ResultWaiter

BATCH = {"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)}


def small(**more):
    return jzero.initialize(model=Regression(), config=CONFIG | more)[0]


def test_every_event_of_a_run_comes_in_order(tmp_path):
    made, found = engine(), []
    for kind in events.EVENTS:
        made.on(kind, found.append)
    losses = [float(made.train_batch(rows(seed))) for seed in range(2)]
    made._observers.waiter.settle()
    evaluated = float(made.eval_batch(rows(9)))
    made.save_checkpoint(tmp_path).wait()
    made._observers.waiter.settle()
    made.load_checkpoint(tmp_path)
    made.save_checkpoint(tmp_path, tag="second").wait()
    made.train_batch({name: x * np.float32(np.nan) for name, x in rows(2).items()})
    for seed in range(2):
        made.train_batch(rows(seed))
    made._observers.waiter.settle()
    made._tell()
    kinds = [type(event) for event in found]
    assert set(kinds) == set(events.EVENTS)
    for kind in ("Step", "Evaluation", "Save"):  # each is announced before it ends
        begun = events.SaveBegan if kind == "Save" else getattr(events, f"{kind}Given")
        assert kinds.index(begun) < kinds.index(getattr(events, f"{kind}Ended"))
    steps = [event for event in found if isinstance(event, events.StepEnded)]
    assert [event.step for event in steps] == [1, 2, 3, 4, 5]
    assert [event.metrics["loss"] for event in steps[:2]] == losses
    assert all(type(x) is float for event in steps for x in event.metrics.values())
    (ended,) = (event for event in found if isinstance(event, events.EvaluationEnded))
    assert (ended.step, ended.metrics["loss"]) == (2, evaluated)
    (state,) = (event for event in found if isinstance(event, events.StateStarted))
    assert (state.step, state.origin) == (2, str(tmp_path / "global_step2"))
    saves = [event.save for event in found if isinstance(event, events.SaveEnded)]
    assert [(save.path.name, save.error) for save in saves] == [("global_step2", None), ("second", None)]
    assert [(event.step, event.what) for event in found if isinstance(event, events.Noticed)] == [(3, "not finite")]


def test_a_function_may_evaluate_and_save(tmp_path):
    """At its `StepGiven` the state is the one after the step."""
    made, saved = engine(), []

    def save(event):
        assert int(made.state.step) == event.step == made.global_steps
        made.eval_batch(rows(9))
        saved.append(made.save_checkpoint(tmp_path).wait().name)

    made.on(events.StepGiven, save)
    for seed in range(2):
        made.train_batch(rows(seed))
    assert saved == ["global_step1", "global_step2"]


def test_an_error_of_a_function_reaches_the_script_and_what_is_no_event_or_function_is_one():
    made = engine()
    no_type = r".*must be a type of event of jzero.events: .*StepEnded"
    for event, function, words in (
        *((kind, print, no_type) for kind in ("StepEnded", int, None)),
        (events.StepEnded, 3, r"StepEnded, 3\): must be a function"),
    ):
        refuses(lambda event=event, function=function: made.on(event, function), rf"engine\.on\({words}")
    made.on(events.StepGiven, lambda event: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.train_batch(rows(0))
    assert made.global_steps == 1


def test_an_engine_goes_with_its_last_name():
    """Its files are complete then; the thread and the summary of the program, which stay, keep no step."""
    made = small()
    made.train_batch(BATCH)
    gone, step, observers = weakref.ref(made), weakref.ref(made.step_fn), made._observers
    gc.collect()
    gc.disable()
    try:
        del made
        assert gone() is None
    finally:
        gc.enable()
    gc.collect()
    assert step() is None
    observers.summary()


def test_the_losses_of_three_calls_are_known_when_their_step_was_given():
    made, losses, found = engine(), [], []
    made.on(events.StepGiven, lambda event: found.extend(float(loss) for loss in losses))
    for micro_batch in parts(0):
        losses.append(made(micro_batch))
        made.backward(losses[-1])
        made.step()
    assert found == [float(loss) for loss in losses]


def test_another_engine_in_the_same_directory_leaves_the_records_of_the_first(tmp_path):
    first = small(checkpoint={"dir": str(tmp_path)})
    ready = threading.Event()
    first._observers.waiter.give(None, lambda values, end: ready.wait(5))  # what follows is on its way
    for _ in range(3):
        first.train_batch(BATCH)
    threading.Timer(0.3, ready.set).start()
    small(checkpoint={"dir": str(tmp_path)})
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] in ("step", "end")][:4] == [1, 2, 3, 3]


class Waits:
    """A result that becomes ready when the test sets `there`; JAX's device_get converts it."""

    def __init__(self, value):
        self.value, self.there = value, threading.Event()

    def __array__(self, dtype=None, copy=None):
        self.there.wait()
        return np.asarray(self.value)


def test_the_time_of_the_devices_belongs_to_what_they_run(monkeypatch):
    """A step and an evaluation, given at once: the devices run one after the other, and their results come in order."""
    now, step, evaluation = [0.0], Waits(1.0), Waits(2.0)
    monkeypatch.setattr(result_waiter.time, "perf_counter", lambda: now[0])
    waiter, ended = ResultWaiter(), queue.SimpleQueue()
    now[0] = 10.0
    for part, result in ((DEVICE, step), (EVALUATION, evaluation)):
        waiter.begin(part, result)
        waiter.give(result, lambda value, end: ended.put((float(value), end)))
    waiter.give(None, lambda values, end: ended.put(values))
    assert waiter.worked(8.0, 11.0) == {DEVICE: 1.0}
    now[0] = 13.0
    step.there.set()
    assert ended.get(timeout=60) == (1.0, 13.0)
    assert waiter.worked(11.0, 14.0) == {DEVICE: 2.0, EVALUATION: 1.0}
    assert waiter.busy()
    now[0] = 15.0
    evaluation.there.set()
    assert ended.get(timeout=60) == (2.0, 15.0)
    assert ended.get(timeout=60) is None
    assert waiter.worked(14.0, 17.0) == {EVALUATION: 1.0}
    assert waiter.worked(17.0, 18.0) == {}
    assert not waiter.busy()
    waiter.close()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_fails_ends_nothing(error):
    """A result, or what shows it."""

    def fail(values, end):
        raise error("no")

    def follow():
        waiter.begin(DEVICE, deleted)
        for result, then in ((deleted, found.append), (1.0, fail), (1.0, lambda values, end: found.append(values))):
            waiter.give(result, then)
        waiter.close()

    waiter, found, deleted = ResultWaiter(), [], jnp.ones(2)
    deleted.delete()
    with pytest.warns(RuntimeWarning) as warned:
        follow()
    words = f"a step is not shown or recorded: {error.__name__}: no"
    assert [str(one.message) for one in warned if "step" in str(one.message)] == [words]
    assert found == [1.0]
    assert not waiter.busy()


def test_a_step_that_never_ends_is_waited_for_once(monkeypatch):
    """As after the death of a peer, whose collective never completes."""
    monkeypatch.setattr(result_waiter, "_limit", lambda: 0.2)
    waiter, never = ResultWaiter(), Waits(0.0)
    waiter.give(never, print)
    waiter.settle()
    began = time.monotonic()
    monkeypatch.setattr(result_waiter, "_limit", lambda: 600.0)
    waiter.settle()
    waiter.close()
    assert time.monotonic() - began < 300.0
    never.there.set()


@pytest.mark.parametrize(("processes", "found"), [(1, [4.0]), (2, [])])
def test_only_a_peer_may_keep_the_last_step_for_ever(processes, found, monkeypatch):
    """Alone, its end comes, however long it takes; a display and a ledger without it would miss it."""
    monkeypatch.setattr(result_waiter, "LAST_STEP_TIMEOUT", 0.1)
    monkeypatch.setattr(result_waiter.jax, "process_count", lambda: processes)
    waiter, seen, last = ResultWaiter(), [], Waits(4.0)
    waiter.give(last, lambda values, end: seen.append(float(values)))
    timer = threading.Timer(0.5, last.there.set)
    timer.start()
    waiter.settle()
    assert seen == found
    timer.join()
    waiter.close()


AFTER_AN_EXCEPTION = """
import time, jax
from jzero.run.result_waiter import ResultWaiter
jax.device_get = lambda results: (time.sleep(0.5), print("fetched", flush=True), {})[2]
waiter = ResultWaiter()
waiter.give({}, print)
raise ValueError("bad luck")
"""


def test_a_program_that_fails_waits_for_the_thread():
    """Python would stop the thread inside of JAX, and abort."""
    done = subprocess.run([sys.executable, "-c", AFTER_AN_EXCEPTION], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("fetched\n")
