"""Spikes of the loss and the gradient norm. The oracle is the spike that the test puts there, and NumPy's median."""

import re
from functools import lru_cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.sampling import keep
from helpers.steps import mesh, settings

import jzero
from jzero.run.diagnosis.step_checks import spike_threshold

ROWS = 8
# The gradient is proportional to the batch's `slope`; without an update, the loss is too.
LINE = SimpleNamespace(
    init=lambda rng: {"w": np.ones(4, np.float32)},
    loss=lambda params, batch, rng: (batch["slope"] * (params["w"].sum() + 1)).mean(),
)


def batch(slope):
    return {"slope": np.full(ROWS, slope, np.float32)}


@lru_cache
def step_of(action):
    config = settings(
        ROWS, lr=1e-4, spikes={"window": 40, "action": action},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1000, "warmup_max_lr": 1e-4}},
    )  # fmt: skip
    return jzero.make_train_step(LINE, config, mesh=mesh(2))


def engine_of(action):
    return jzero.Engine(step_of(action), jax.random.key(0))


SLOPES = 1 + 0.1 * np.random.default_rng(0).normal(size=60)


@pytest.mark.parametrize("action", keep(["report", "skip"], ["skip"]))
def test_a_spike_is_reported_and_skipped(action, capsys):
    engine = engine_of(action)
    for i in range(30):
        engine.train_batch(batch(10.0 if i == 3 else SLOPES[i]))  # without a limit in the first 20 steps
    before, lr = jax.device_get(engine.state.params), engine.get_lr()
    engine.train_batch(batch(10.0))
    assert np.all(before["w"] == np.asarray(engine.state.params["w"])) == (action == "skip")
    assert (engine.get_lr() == lr) == (action == "skip")
    engine.train_batch(batch(SLOPES[31]))
    assert np.any(before["w"] != np.asarray(engine.state.params["w"]))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "spike:" in line)
    found = re.match(r"jzero: step 31: spike: loss ([\d.]+) \(limit ([\d.]+), .*, gradient norm 20 \(limit", line)
    assert float(found[1]) == pytest.approx(50, rel=0.01)
    assert line.endswith("the step changed nothing") == (action == "skip")
    assert engine.skipped_steps == (action == "skip")
    # The limit of step 31 comes from the losses of the steps before 30, which had ended when step 30 was given.
    losses = [5 * (10.0 if i == 3 else SLOPES[i]) for i in range(29)]  # the parameters hardly move
    median = np.median(losses)
    expected = median + 6 * 1.4826 * np.median(np.abs(np.array(losses) - median))
    assert float(found[2]) == pytest.approx(expected, rel=0.01)


def test_a_new_level_becomes_the_median():
    engine, skipped = engine_of("skip"), []
    for i in range(80):
        engine.train_batch(batch(SLOPES[i % 40] + 3 * (i >= 40)))
        skipped.append(engine.skipped_steps)
    assert 15 <= skipped[69] <= 25  # until half of the window is on the new level
    assert skipped[39] == 0
    assert skipped[79] == skipped[69]


def test_nothing_is_said_about_steps_that_are_not_finite(capsys):
    engine = engine_of("report")
    for i in range(30):
        engine.train_batch(batch(np.nan if i % 5 == 0 else SLOPES[i]))
    assert "spike:" not in capsys.readouterr().out
    assert np.isfinite(engine._checks._spikes._limits).all()
    assert spike_threshold([2.0] * 30, 6) == pytest.approx(2.12)  # values alike: six times a hundredth of the median
