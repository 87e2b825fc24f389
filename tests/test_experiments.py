"""The programs a newcomer runs first: they learn, they leave what they promise, they refuse in one line."""

import csv
import json

import numpy as np
import pytest

from experiments import quickstart, text
from experiments.tutorial import data_parallel, zero1, zero2, zero3


@pytest.mark.parametrize("program", [data_parallel, zero1, zero2, zero3], ids=lambda p: p.__name__.rsplit(".", 1)[1])
def test_tutorial_learns_the_digits(program):
    assert program.main() > 0.95


def test_quickstart_leaves_its_files(tmp_path, capsys):
    out = tmp_path / "run"
    override = '{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 200}}'
    quickstart.main(["--steps", "12", "--layers", "1", "--sequence", "32", "--out", str(out), "--config", override])
    printed = capsys.readouterr().out
    assert "held-out loss" in printed
    assert quickstart.PROMPT in printed
    assert {path.name for path in out.iterdir()} == {"checkpoint", "config.json", "metrics.csv", "loss.png"}
    config = json.loads((out / "config.json").read_text())
    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 200
    with (out / "metrics.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoint" / "latest").read_text() == "global_step12"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steps", "0"], "--steps: '0'"),
        (["--setps", "3"], "--setps"),
        (["--stage", "4"], "--stage"),
        (["--preset", "9b"], "9b"),
        (["--config", "{nonsense"], "--config"),
        (["--config", "no-such-file.json"], "no-such-file.json"),
        (["--config", '{"optimizr": {}}'], "optimizer"),
        (["--config", '{"mesh": {"zero": 3}}'], "3"),
        (["--sequence", "100000000"], "--sequence"),
        (["--out", "pyproject.toml"], "pyproject.toml"),
    ],
)
def test_quickstart_refuses_in_one_line(options, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(SystemExit) as stopped:
        quickstart.main(options)
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.count("\n") == 1
    assert named in said
    assert not (tmp_path / "runs").exists()


def test_corpus_splits_by_file_and_repeats():
    train, held_out = text.standard_library(300_000)
    again = text.standard_library(300_000)
    assert np.array_equal(train, again[0])
    assert np.array_equal(held_out, again[1])
    assert 300_000 <= len(train) + len(held_out) < 1_000_000


def test_windows_label_every_byte_with_the_next():
    rows = text.windows(np.arange(10, dtype=np.uint8), 4)
    assert rows["inputs"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_bigram_loss_is_the_smoothed_conditional():
    train = np.frombuffer(b"ababab", np.uint8)  # a is followed by b three times, b by a twice
    loss = text.bigram_loss(train, np.array([[ord("a"), ord("b")]]), np.array([[ord("b"), ord("a")]]))
    assert loss == pytest.approx(-(np.log(4 / 259) + np.log(3 / 258)) / 2)
