"""A step that is not finite in a job of two processes: each says the same, and the fault is where the test put it."""

import re

import pytest
from jobs import QUICK, Command

pytestmark = pytest.mark.processes

PROGRAM = """
import jax, numpy as np
import jzero
from jzero.loss_scale import NonFiniteError


class Net:
    def init(self, rng):
        return {"ends": {"out": np.eye(4, dtype="float32")}, "stack": {"w": 0.1 * jax.random.normal(rng, (3, 4, 4))}}

    def prefix(self, ends, batch, rng):
        return batch["x"]

    def block(self, layer, x, rng):
        return x + jax.numpy.tanh(x @ layer["w"])

    def suffix(self, ends, x, batch, rng):
        return ((x @ ends["out"]) ** 2).mean()

    def loss(self, params, batch, rng):
        raise NotImplementedError


def batch(seed):
    return {"x": np.random.default_rng(seed).normal(size=(8, 4)).astype("float32")}


def make_engine():
    config = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": STAGE},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "non_finite": {"action": "stop"},
    }
    return jzero.initialize(model=Net(), config=config)[0]


def main():
    engine = make_engine()
    engine.train_batch(batch(0))
    bad = batch(1)
    bad["x"][6] = np.nan  # of process 1: its rows are 4 to 7, and its second micro-batch is 6 and 7
    engine.train_batch(bad)
    try:
        engine.train_batch(batch(2))
    except NonFiniteError as error:
        jzero.log_dist("found " + str(error).replace(chr(10), "; "), ranks=[-1])
    w = engine.state.params["stack"]["w"]
    if jax.process_index() == 1:
        parts = [np.array(shard.data) for shard in w.addressable_shards]
        parts[0][1] = np.nan
        copies = [jax.device_put(x, s.device) for x, s in zip(parts, w.addressable_shards)]
    else:
        copies = [shard.data for shard in w.addressable_shards]
    engine.state.params["stack"]["w"] = jax.make_array_from_single_device_arrays(w.shape, w.sharding, copies)
    engine.train_batch(batch(0))
    try:
        engine.train_batch(batch(2))
    except NonFiniteError as error:
        jzero.log_dist("found " + str(error).replace(chr(10), "; "), ranks=[-1])


main()
"""


@pytest.mark.slow
def test_both_processes_name_the_row_and_the_process(tmp_path):
    (tmp_path / "worker.py").write_text(PROGRAM.replace("STAGE", "0"))
    job = Command("--platform", "cpu", "--num_gpus", 2, "worker.py", cwd=tmp_path, env=QUICK)
    try:
        assert job.wait() == 0, job.errors
    finally:
        job.end()
    found = [re.findall(rf"^\[{rank}\] found (.*)$", job.output, re.M) for rank in (0, 1)]
    assert found[0] == found[1], job.output
    row, copy = found[0]
    assert "step 2: the loss is nan" in row
    assert "first in the forward pass: the prefix" in row
    assert "in micro-batch 1 of 2, on replica 1: row 6 of the global batch" in row
    assert "step 2: the loss is nan" in copy
    assert "parameter stack/w, layer 1, is not finite on device 1 (process 1); the same part is" in copy
    assert "finite on device 0 (process 0)" in copy
    assert "first in the forward pass: layer 1 of 3" in copy
    assert (tmp_path / "non_finite" / "step2" / "README.md").exists()
