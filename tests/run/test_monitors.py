"""Monitors: the files of a run read back equal to the metrics that the engine returned."""

import csv
import json
import struct
import sys
import types

import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.regression import CONFIG, Regression

import jzero
from jzero.config.observed import FilesConfig
from jzero.run import monitors


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
        assert header[0] == "step"
        assert path.stem == f"Train_Samples_{header[1]}"
        found[f"Train/Samples/{header[1]}"] = [(int(x), float(y)) for x, y in rows]
    return found


def read_tensorboard(directory):
    """Read an event file by its format (TFRecord: length, its checksum, data, its checksum)."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = directory.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True}}], ids=["fp32", "fp16"])
def test_files_contain_the_metrics_of_every_step(tmp_path, precision):
    sections = {name: files(tmp_path / name) for name in ("csv_monitor", "jsonl_monitor", "tensorboard")}
    engine, expected = train(**sections, **precision)
    engine._observers.close()
    assert {"Train/Samples/train_loss", "Train/Samples/worst", "Train/Samples/eval_worst"} <= set(expected)
    assert read_csv(tmp_path / "csv_monitor" / "run") == expected
    assert read_tensorboard(tmp_path / "tensorboard" / "run") == expected
    lines = [json.loads(line) for line in (tmp_path / "jsonl_monitor/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5]
    found = {}
    for line in lines:
        samples = line.pop("samples")
        assert samples == 8 * line.pop("step")
        for name, value in line.items():
            found.setdefault(name, []).append((samples, float(value)))  # "inf" under fp16
    assert found == expected


def test_times_of_a_breakdown(tmp_path):
    engine, _ = train(steps=4, csv_monitor=files(tmp_path), wall_clock_breakdown=True, steps_per_print=2)
    engine._observers.close()
    found = read_csv(tmp_path / "run")
    parts = {name.rpartition("_")[2]: rows for name, rows in found.items() if "elapsed_time_ms" in name}
    assert [samples for samples, _ in parts["step"]] == [16, 32]
    for samples, spent in parts.pop("step"):
        assert spent == pytest.approx(sum(dict(rows).get(samples, 0) for rows in parts.values()))


def test_a_monitor_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(monitors.CsvFiles, "write", full)
    sections = {"csv_monitor": files(tmp_path / "csv"), "jsonl_monitor": files(tmp_path / "lines")}
    with pytest.warns(RuntimeWarning, match="csv_monitor: no more curves from this run: OSError: No space left"):
        train(steps=3, **sections)[0]._observers.close()  # it waits for the thread that writes
    assert len((tmp_path / "lines/run/metrics.jsonl").read_text().splitlines()) == 4


def test_the_curves_stay_where_they_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    curves = monitors.CsvFiles(FilesConfig(enabled=True, output_path="here", job_name="run"))
    curves.write({"Train/Samples/lr": 1.0}, 8, 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    curves.write({"Train/Samples/lr": 2.0, "Train/Samples/eval_loss": 3.0}, 16, 2)
    expected = {"Train/Samples/lr": [(8, 1.0), (16, 2.0)], "Train/Samples/eval_loss": [(16, 3.0)]}
    assert read_csv(tmp_path / "here" / "run") == expected
    curves.close()
    with pytest.raises(ValueError, match="closed file"):
        curves.write({"Train/Samples/lr": 3.0}, 24, 3)


def test_a_step_is_written_once_it_has_ended_and_a_resumed_run_continues(tmp_path):
    """Without another step, and without an end of the run."""
    engine, expected = train(steps=2, csv_monitor=files(tmp_path))
    engine._observers.waiter.settle()
    assert read_csv(tmp_path / "run") == expected
    for _ in range(2):
        engine._observers.close()
        engine, _ = train(steps=1, csv_monitor=files(tmp_path))
    engine._observers.close()
    assert [len(rows) for rows in read_csv(tmp_path / "run").values()] == [4, 4, 4, 4]


@pytest.fixture
def service(monkeypatch):
    """Stands for wandb and Comet: records how a run was started, and what it is told."""
    started, calls = {}, []

    class Run:
        def __getattr__(self, name):
            return lambda *args, **keywords: calls.append((name, args, keywords))

    def begin(**keywords):
        started.update(keywords)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=begin))
    monkeypatch.setitem(sys.modules, "comet_ml", types.SimpleNamespace(start=begin))
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: name)
    return started, calls


def test_weights_and_biases(service):
    started, calls = service
    engine, expected = train(steps=2, wandb={"enabled": True, "project": "p", "team": "t"})
    engine._observers.close()
    assert started == {"project": "p", "group": None, "entity": "t"}
    assert [(name, keywords) for name, _, keywords in calls] == [
        ("log", {"step": 8}), ("log", {"step": 16}), ("finish", {}),
    ]  # fmt: skip
    assert calls[0][1][0]["Train/Samples/train_loss"] == expected["Train/Samples/train_loss"][0][1]


def test_comet_takes_a_value_every_so_many_samples(service):
    started, calls = service
    section = {"enabled": True, "samples_log_interval": 16, "online": False, "experiment_name": "n"}
    train(steps=5, comet=section)[0]._observers.close()
    assert started["online"] is False
    assert calls[0] == ("set_name", ("n",), {})
    losses = [keywords for _, args, keywords in calls if args[:1] == ("Train/Samples/train_loss",)]
    assert losses == [{"step": 8}, {"step": 24}, {"step": 40}]


def refuse(**_):
    raise RuntimeError("no API key")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("tensorboard", r"tensorboard.enabled = true: the package tensorboardX .*; pip install -e '.*\[tensorboard\]'"),
        ("wandb", r"wandb.enabled = true: the package wandb .*; pip install -e '.*\[wandb\]'"),
        ("comet", r"comet.enabled = true: the package comet_ml .*; pip install -e '.*\[comet\]'"),
        ("wandb", "wandb: RuntimeError: no API key"),
        ("csv_monitor", r"csv_monitor.output_path, .*file is not a writable directory"),
    ],
)
def test_what_a_monitor_refuses(section, words, tmp_path, monkeypatch):
    there = "API" in words
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: name if there else None)
    (tmp_path / "file").write_text("")
    more = files(tmp_path / "file") if section == "csv_monitor" else {"enabled": True}
    refuses(lambda: train(**{section: more}), words)
