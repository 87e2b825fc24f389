"""The events of a run, as a user's functions get them."""

import gc
import json
import threading
import weakref

import numpy as np
import pytest
from helpers.engines import engine, rows
from helpers.refusals import refuses
from helpers.regression import CONFIG, Regression

import jzero
from jzero import events

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
    gc.freeze()  # as conftest.py does: what other tests have left takes long to collect
    made = small()
    made.train_batch(BATCH)
    gone, step, observers = weakref.ref(made), weakref.ref(made.step_fn), made._observers
    gc.collect()
    gc.disable()
    try:
        del made
        assert gone() is None
        gc.collect()
        assert step() is None
    finally:
        gc.enable()
    observers.summary()


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
