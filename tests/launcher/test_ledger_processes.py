"""The ledger of a job that is killed and started again: one curve, and the time that the kill cost."""

import re

import pytest
from jobs import QUICK, Command

from jzero import ledger

WORKER = """
import os, signal, time
import jax.numpy as jnp, jzero, numpy as np
from jzero import ledger

class Model:
    def init(self, rng):
        return {"w": jnp.zeros((3,))}
    def loss(self, params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

x = np.random.default_rng(0).normal(size=(44, 3)).astype(np.float32)
config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "checkpoint": {"dir": "runs"}}
engine, *_ = jzero.initialize(model=Model(), config=config, training_data={"x": x, "y": x.sum(1)}, resume="auto")
first = not os.path.exists("killed")
while engine.global_steps < 8:
    loss = float(engine.train_batch())
    print(f"step {engine.global_steps} {loss.hex()}", flush=True)
    if engine.global_steps == 3:
        engine.save_checkpoint().wait()
    if engine.global_steps == 6 and first:
        while not ledger.read("runs").of("save") or 6 not in ledger.read("runs").steps:
            time.sleep(0.05)  # a thread writes them
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
raise ValueError("bad luck")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_job_has_one_curve(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    job = Command("--platform", "cpu", "--max_restarts", 1, "worker.py", cwd=tmp_path, env=QUICK)
    try:
        assert job.wait() == 1, job.errors
    finally:
        job.end()
    printed = [(int(n), float.fromhex(x)) for n, x in re.findall(r"^step (\d+) (\S+)$", job.output, re.M)]
    assert [n for n, _ in printed] == [*range(1, 7), *range(4, 9)]
    run = ledger.read(tmp_path / "runs")
    assert {n: step.metrics["loss"] for n, step in run.steps.items()} == dict(printed)
    (killed,) = run.failures
    assert killed["code"] == 137
    assert re.fullmatch(r"rank 0 was killed by signal 9 \(SIGKILL\) first, after \d+ s", killed["reason"])
    assert [end["reason"] for end in run.of("end")] == ["ValueError: bad luck"]
    assert [one["step"] for one in run.of("state")] == [0, 3]
    found = run.goodput
    assert {"repeated steps", "restart", "restore", "compile", "save"} <= set(found.lost)
    assert "stopped" not in found.lost
    assert found.steps + sum(found.lost.values()) == pytest.approx(found.wall, abs=1e-3)
    assert found.wall > found.lost["restart"] > 0
