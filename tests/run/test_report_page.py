"""The page of a run: the plan's, with what was measured beside it."""

import dataclasses
import re
import time

import jax
import pytest
from helpers.engines import Net, build, config, mesh, rows

import jzero
from jzero.planner import GPUS
from jzero.planner.plan import observed


@pytest.fixture
def cpus(monkeypatch):
    """Describe this machine's devices as GPUs of some kind."""
    kind = dataclasses.replace(GPUS["h200"], description=jax.devices()[0].device_kind)
    monkeypatch.setitem(GPUS, "h200", kind)


@pytest.fixture(scope="module")
def ran():
    """An engine after its first step, which no other test runs."""
    made = build(3)[0]
    made.train_batch(rows(0))
    return made


@pytest.mark.slow
def test_an_engine_knows_its_time_and_the_page_shows_it(cpus, ran, tmp_path):
    pytest.importorskip("matplotlib")
    walls = []
    for _ in range(12):
        start = time.perf_counter()
        float(ran.train_batch(rows(0)))
        walls.append(time.perf_counter() - start)
    assert min(walls) / 2 < ran.seconds_per_step() < 2 * max(walls)
    text = jzero.report(ran, html=tmp_path / "run.html")
    assert text.startswith("jzero run report")
    page = (tmp_path / "run.html").read_text()
    assert "Planned and measured" in page
    assert "on them" in page
    assert not re.search(r"(src|href)=\"http", page)


def test_measured_beside_planned(cpus, ran):
    """The program is the one that ran: XLA's own figures."""
    plan = observed(ran.step_fn, 0.5)
    stats = ran.step_fn.lower(rows(0)).compile().memory_analysis()
    assert plan.memory.xla.temps == stats.temp_size_in_bytes
    assert plan.measured.step_s == 0.5
    assert plan.gpus == 4
    assert plan.collectives


def test_no_page_without_a_step_or_a_gpu(ran, tmp_path):
    unused = jzero.make_train_step(Net(), config(), mesh=mesh())
    for step, words in ((unused, "did not run yet"), (ran.step_fn, "not a GPU that")):
        with pytest.raises(jzero.ConfigError, match=words):
            jzero.report(step, html=tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()
