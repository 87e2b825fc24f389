"""The page of a run: the plan's, with what was measured beside it."""

import dataclasses
import re
import time

import jax
import numpy as np
import pytest

import jzero
from jzero.planner import GPUS
from jzero.planner.plan import observed
from models.llama import Llama, preset

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "progress": {"panel": False},
}
BATCH = {name: np.ones((8, 64), np.int32) for name in ("inputs", "labels")}


def model():
    return jzero.from_flax(lambda rngs: Llama(preset("tiny", num_layers=2), rngs=rngs))


@pytest.fixture
def cpus(monkeypatch):
    """Describe this machine's devices as GPUs of some kind."""
    kind = dataclasses.replace(GPUS["h200"], description=jax.devices()[0].device_kind)
    monkeypatch.setitem(GPUS, "h200", kind)


@pytest.mark.slow
def test_an_engine_knows_its_time_and_the_page_shows_it(cpus, tmp_path):
    pytest.importorskip("matplotlib")
    engine, *_ = jzero.initialize(model=model(), config=CONFIG)
    engine.train_batch(BATCH)
    walls = []
    for _ in range(12):
        start = time.perf_counter()
        float(engine.train_batch(BATCH))
        walls.append(time.perf_counter() - start)
    found = engine.seconds_per_step()
    assert min(walls) / 2 < found < 2 * max(walls)
    text = jzero.report(engine, html=tmp_path / "run.html")
    assert text.startswith("jzero run report")
    page = (tmp_path / "run.html").read_text()
    assert "Planned and measured" in page
    assert "on them" in page
    assert not re.search(r"(src|href)=\"http", page)


def test_measured_beside_planned(cpus):
    """The program is the one that ran: XLA's own figures."""
    step = jzero.make_train_step(model(), CONFIG)
    step(step.init(jax.random.key(0)), BATCH)
    plan = observed(step, 0.5)
    stats = step.lower(BATCH).compile().memory_analysis()
    assert plan.memory.xla.temps == stats.temp_size_in_bytes
    assert plan.measured.step_s == 0.5
    assert plan.gpus == len(jax.devices())
    assert plan.collectives


@pytest.mark.parametrize("runs", [False, True])
def test_no_page(runs, tmp_path):
    step = jzero.make_train_step(model(), CONFIG)
    if runs:
        step(step.init(jax.random.key(0)), BATCH)
    with pytest.raises(jzero.ConfigError, match="not a GPU that" if runs else "did not run yet"):
        jzero.report(step, html=tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()
