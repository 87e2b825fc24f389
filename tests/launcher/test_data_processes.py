"""The loader in a job of two processes: each reads half of the rows, and the losses are those of one process."""

import json
import re

import jax
import pytest
from jobs import QUICK, Command

pytestmark = pytest.mark.processes

PROGRAM = """
import json, sys
import jax, numpy as np
import jzero
from models.mlp import MLP, cross_entropy


class Counted:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=(50, 8)).astype("float32"), rng.integers(0, 2, 50).astype("int32")
        self.read = 0

    def __len__(self):
        return 50

    def rows(self, indices):
        self.read += len(indices)
        return self.x[indices], self.y[indices]

    def __iter__(self):
        return zip(self.x, self.y)


def train(devices=None):
    losses, data = [], Counted()
    for training_data in (data, lambda: iter(data)):
        config = {
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        }
        model = jzero.from_flax(lambda rngs: MLP(8, 16, 2, rngs=rngs), cross_entropy)
        mesh = jzero.make_mesh(devices=devices)
        engine, _, loader, _ = jzero.initialize(model=model, config=config, mesh=mesh, training_data=training_data)
        losses += [float(engine.train_batch()) for _ in range(5)]  # past the end of the epoch
        loader.seek({"epoch": 0, "samples": 32})
        losses += [float(engine.train_batch()) for _ in range(3)]
        assert loader.position == {"epoch": 1, "samples": 16}, loader
    return losses, data.read
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    space = {}
    exec(PROGRAM, space)
    expected, read = space["train"](jax.devices()[:2])
    last = "losses, read = train()\njzero.log_dist(json.dumps([losses, read]), ranks=[-1])"
    (tmp_path / "worker.py").write_text(f"{PROGRAM}\n{last}\n")
    job = Command("--platform", "cpu", "--num_gpus", 2, "worker.py", cwd=tmp_path, env=QUICK)
    try:
        assert job.wait() == 0, job.errors
    finally:
        job.end()
    said = [json.loads(text) for text in re.findall(r"^\[\d\] (\[\[.*)$", job.output, re.M)]
    assert len(said) == 2
    assert said[0][0] == said[1][0] == pytest.approx(expected, rel=1e-6)
    assert read >= 16 * 8
    assert all(8 * 8 <= mine <= 8 * 8 + 40 for _, mine in said)  # half, and what was read ahead
    assert len(set(expected)) == len(expected)
