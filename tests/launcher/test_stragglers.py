"""Who is late: one of two processes whose data are slow, and a slow device."""

import re
from types import SimpleNamespace

import pytest
from helpers.engines import build, printed, rows
from jobs import QUICK
from workers import CPU

from jzero.run.diagnosis import stragglers
from jzero.run.diagnosis.stragglers import Report, late, slow


def test_a_late_process_has_a_line():
    """One that waits for the others is not late; nor is a device among equal ones."""
    for own, names in (
        ([1.0, 5.9, 1.0], []),  # 4.9 ms of about 100
        ([1.0, 7.0, 1.0], [1]),
        ([30.0, 1.0, 30.0, 1.0, 1.0], [0, 2]),
        ([40.0, 1.0], [0]),
        ([40.0, 40.0], []),  # nobody waits for another
        ([40.0], []),
    ):
        reports = [Report(f"host{i}", {"data": ms, "device": 100.0 - ms}, {}) for i, ms in enumerate(own)]
        assert [int(re.search(r"process (\d+) on host\1:", text)[1]) for text in late(reports)] == names
        (text,) = late([Report("a", {"data": 1.0, "peers": 50.0}, {}), Report("b", {"data": 51.0}, {})])
        assert "process 1 on b" in text
        assert slow([Report("a", {}, {"0": 2.0, "1": 2.25})]) == []


def test_a_slow_device_is_named_in_the_run(capsys, monkeypatch):
    monkeypatch.setattr(stragglers, "time_matmuls", lambda devices: {str(d.id): 2.0 + (d.id == 3) for d in devices})
    made = build(more={"straggler_check": {"every": 2}})[0]
    for seed in range(5):
        made.train_batch(rows(seed))
    lines = [line for line in printed(made, capsys).splitlines() if "straggler" in line]
    assert [line[:29] for line in lines] == [f"jzero: step {step}: straggler: dev" for step in (2, 4)]
    text = r"device 3 on \S+ computes a matmul in 3.00 ms, the median of 4 devices in 2.00"
    assert all(re.search(text, line) for line in lines)


def test_a_run_that_goes_back_measures_again(monkeypatch):
    """As after a step that is not finite, and stopped the run."""
    monkeypatch.setattr(stragglers, "time_matmuls", lambda devices: {})
    made = build(more={"straggler_check": {"every": 2}})[0]
    check = made._checks._stragglers
    for number in (1, 2, 2, 3, 4):
        made._observers.clock.lap("script")  # time passes
        check.take(SimpleNamespace(global_steps=number), {}, None)
    assert check._mark[0] == 4


PROGRAM = """
import time
import jax, numpy as np
import jzero
from helpers.regression import CONFIG, Regression


def batches():
    while True:
        if jax.process_index() == 1:
            time.sleep(0.5)
        yield {"x": np.ones((8, 3), "float32"), "y": np.ones(8, "float32")}


engine = jzero.initialize(model=Regression(), config=CONFIG | {"straggler_check": {"every": 4}})[0]
source = batches()
for _ in range(4):
    engine.train_batch(source)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_the_process_whose_data_are_slow_is_named(start):
    job = start(*CPU, 2, "worker.py", program=PROGRAM, env=QUICK).ended()
    (text,) = re.findall(r"jzero: step 4: straggler: (.*)$", job.output, re.M)
    data = re.match(r"process 1 on \S+: its devices wait .* elsewhere\): data ([\d.]+)", text)
    assert float(data[1]) >= 250.0  # of 500; the devices may still work on the step before
