"""The files and services of a run get the metrics that the engine returned, and a user's functions its events."""

import csv
import gc
import json
import sys
import threading
import types
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.engines import engine, rows
from helpers.refusals import refuses
from helpers.regression import CONFIG, Regression

import jzero
from jzero import events
from jzero.config.observed import FilesConfig
from jzero.run import monitors

LOSS = "Train/Samples/train_loss"


def train(steps=5, **sections):
    """Return (engine, events): {event: [(samples, value)]} by the metrics that each step returned."""
    engine, *_ = jzero.initialize(model=Regression(), config=CONFIG | sections)
    rng, expected = np.random.default_rng(0), {}

    def expect(names):
        for name, value in names.items():
            expected.setdefault(f"Train/Samples/{name}", []).append((engine.global_samples, float(value)))

    for i in range(steps):
        x = rng.normal(size=(8, 3)).astype(np.float32)
        batch = {"x": x, "y": x.sum(1)}
        loss = engine.train_batch(batch)
        metrics = dict(engine.metrics)
        assert metrics.pop("loss") == loss
        scaling = {name: metrics.pop(name) for name in ("loss_scale", "skipped")}
        expect({"train_loss": loss, **metrics, **(scaling if "fp16" in sections else {})})
        if i == 2:
            engine.eval_batch(batch)
            expect({f"eval_{name}": value for name, value in engine.eval_metrics.items()})
    return engine, expected


def files(tmp_path):
    return {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}


def read_csv(directory):
    found = {}
    for path in directory.glob("*.csv"):
        header, *rows = csv.reader(path.open(newline=""))
        assert header == ["step", path.stem.removeprefix("Train_Samples_")]
        found[f"Train/Samples/{header[1]}"] = [(int(x), float(y)) for x, y in rows]
    return found


@pytest.fixture
def services(monkeypatch):
    """Stand for the packages of services: {service: (arguments of its start, what it is told)}."""
    found = {}

    def started(service):
        class Run:
            def __getattr__(self, name):
                return lambda *args, **keywords: found[service][1].append((name, *args, keywords))

        return lambda *args, **keywords: found.update({service: ((*args, keywords), [])}) or Run()

    for package, start in (("wandb", "init"), ("comet_ml", "start"), ("tensorboardX", "SummaryWriter")):
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(**{start: started(package)}))
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: name)
    return found


def test_each_monitor_gets_the_metrics_of_every_step(services, tmp_path):
    """Comet a value every so many samples."""
    sections = {name: files(tmp_path / name) for name in ("csv_monitor", "jsonl_monitor", "tensorboard")}
    sections["wandb"] = {"enabled": True, "project": "p", "team": "t"}
    sections["comet"] = {"enabled": True, "samples_log_interval": 16, "online": False, "experiment_name": "n"}
    engine, expected = train(**sections, fp16={"enabled": True})
    engine._observers.close()
    assert {LOSS, "Train/Samples/worst", "Train/Samples/eval_worst"} <= set(expected)
    assert read_csv(tmp_path / "csv_monitor" / "run") == expected
    lines = [json.loads(line) for line in (tmp_path / "jsonl_monitor/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5]
    logged = [(words["step"], values) for _, values, words in services["wandb"][1][:-1]]
    for found in (logged, [(line.pop("samples"), line) for line in lines if line.pop("step")]):
        curves = {}
        for samples, values in found:
            for name, value in values.items():
                curves.setdefault(name, []).append((samples, float(value)))  # "inf" under fp16
        assert curves == expected
    assert services["wandb"][0] == ({"project": "p", "group": None, "entity": "t"},)
    assert services["wandb"][1][-1] == ("finish", {})
    directory, told = services["tensorboardX"]
    assert directory == (str(tmp_path / "tensorboard" / "run"), {})
    assert [(samples, value) for _, name, value, samples, _ in told[:-1] if name == LOSS] == expected[LOSS]
    started, told = services["comet_ml"]
    assert (started[0]["online"], told[0]) == (False, ("set_name", "n", {}))
    losses = [(words["step"], value) for _, name, value, words in told[1:-1] if name == LOSS]
    assert losses == expected[LOSS][::2]


def test_a_monitor_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(monitors.CsvFiles, "write", Mock(side_effect=OSError("No space left on device")))
    sections = {"csv_monitor": files(tmp_path / "csv"), "jsonl_monitor": files(tmp_path / "lines")}
    with pytest.warns(RuntimeWarning, match="csv_monitor: no more curves from this run: OSError: No space left"):
        train(steps=3, **sections)[0]._observers.close()  # it waits for the thread that writes
    assert len((tmp_path / "lines/run/metrics.jsonl").read_text().splitlines()) == 4


def test_a_step_is_written_once_it_has_ended_and_a_resumed_run_continues(tmp_path):
    """Without another step, and without an end of the run."""
    engine, expected = train(steps=2, csv_monitor=files(tmp_path))
    engine._observers.waiter.settle()
    assert read_csv(tmp_path / "run") == expected
    engine._observers.close()
    train(steps=1, csv_monitor=files(tmp_path))[0]._observers.close()
    assert [len(rows) for rows in read_csv(tmp_path / "run").values()] == [3, 3, 3, 3]


def test_what_a_monitor_refuses(monkeypatch):
    refuse = Mock(side_effect=RuntimeError("no API key"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: name if name == "wandb" else None)
    for section, words in (
        ("tensorboard", r"tensorboard.enabled = true: the package tensorboardX .*; pip install -e '.*\[tensorboard\]'"),
        ("comet", r"comet.enabled = true: the package comet_ml .*; pip install -e '.*\[comet\]'"),
        ("wandb", "wandb: RuntimeError: no API key"),
    ):
        refuses(lambda section=section: train(**{section: {"enabled": True}}), words)


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


def test_a_function_may_evaluate_and_save_and_its_error_reaches_the_script(tmp_path):
    """At its `StepGiven` the state is the one after the step. What is no event or function is an error."""
    made, saved = engine(), []
    no_type = r".*must be a type of event of jzero.events: .*StepEnded"
    for event, function, words in (
        *((kind, print, no_type) for kind in ("StepEnded", int, None)),
        (events.StepEnded, 3, r"StepEnded, 3\): must be a function"),
    ):
        refuses(lambda event=event, function=function: made.on(event, function), rf"engine\.on\({words}")

    def save(event):
        assert int(made.state.step) == event.step == made.global_steps
        made.eval_batch(rows(9))
        saved.append(made.save_checkpoint(tmp_path).wait().name)

    made.on(events.StepGiven, save)
    made.train_batch(rows(0))
    made.on(events.StepGiven, lambda event: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.train_batch(rows(1))
    assert saved == ["global_step1", "global_step2"]


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


@pytest.mark.slow
def test_tensorboard_itself(tmp_path):
    board = monitors.TensorBoard(FilesConfig(enabled=True, output_path=str(tmp_path), job_name=""))
    board.write({LOSS: 2.0}, 16, 2)
    board.close()
    assert b"train_loss" in next(tmp_path.iterdir()).read_bytes()
