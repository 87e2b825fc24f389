"""Training in jobs of several processes: loaders, groups of devices, the ledger of a killed job, non-finite values.

The numbers are those of one process; the fault is where the test puts it.
"""

import json
import re

import jax
import numpy as np
import pytest
from helpers.tensor_models import reference
from jobs import QUICK
from workers import CPU

from jzero import ledger

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LOADER = """
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


def test_two_processes_train_as_one(start):
    """Each reads half of the rows."""
    space = {}
    exec(LOADER, space)
    expected, read = space["train"](jax.devices()[:2])
    last = "losses, read = train()\njzero.log_dist(json.dumps([losses, read]), ranks=[-1])"
    job = start(*CPU, 2, "worker.py", program=f"{LOADER}\n{last}\n", env=QUICK).ended()
    said = [json.loads(text) for text in re.findall(r"^\[\d\] (\[\[.*)$", job.output, re.M)]
    assert len(said) == 2
    assert said[0][0] == said[1][0] == pytest.approx(expected, rel=1e-6)
    assert read >= 16 * 8
    assert all(8 * 8 <= mine <= 8 * 8 + 40 for _, mine in said)  # half, and what was read ahead
    assert len(set(expected)) == len(expected)


GROUPS = """
import json
import jax, numpy as np
import jzero

jzero.init_distributed()
from helpers.tensor_models import batches, initial, make_step
from jzero.step.batch import rows_of_this_process

step = make_step({model!r}, **{layout!r})
state, seen = step.init(jax.random.key(0), initial({model!r})), []
for i, batch in enumerate(batches()):
    mine = rows_of_this_process(step.batch_sharding, len(batch["inputs"]))
    state, metrics = step(state, {{name: x[mine] for name, x in batch.items()}} if i else batch)
    seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
jzero.log_dist(json.dumps([len(mine), seen]), ranks=[-1])
"""


@pytest.mark.parametrize(
    ("model", "processes", "layout", "rows"),
    [
        pytest.param("nnx", 2, {"tensor": 2, "stage": 3}, 16, id="tensor"),
        pytest.param("llama", 4, {"zero": 2, "context": 2, "stage": 3, "accum": 2}, 8, id="context"),
        pytest.param("llama", 4, {"pipe": 2, "tensor": 2, "accum": 2}, 16, id="pipeline of groups"),
    ],
)
def test_one_device_computes_the_same(start, model, processes, layout, rows):
    """Devices of several processes act as one: each process passes its rows."""
    program = GROUPS.format(model=model, layout=layout)
    job = start(*CPU, processes, "worker.py", program=program, env=QUICK).ended()
    lines = [json.loads(line) for line in re.findall(r"^\[\d\].*?(\[\d+, \[\[.*)$", job.output, re.M)]
    assert [mine for mine, _ in lines] == [rows] * processes
    for _, seen in lines:
        np.testing.assert_allclose(seen, reference(model)[0], rtol=1e-6)


KILLED = """
import os, signal, time
import jzero, numpy as np
from helpers.regression import CONFIG, Regression
from jzero import ledger

x = np.random.default_rng(0).normal(size=(44, 3)).astype(np.float32)
config, data = CONFIG | {"checkpoint": {"dir": "runs"}}, {"x": x, "y": x.sum(1)}
engine, *_ = jzero.initialize(model=Regression(), config=config, training_data=data, resume="auto")
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


def test_a_killed_job_has_one_curve(start, tmp_path):
    """And the time that the kill cost."""
    job = start(*CPU, 1, "--max_restarts", 1, "worker.py", program=KILLED, env=QUICK).ended(1)
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


NON_FINITE = """
import jax, numpy as np
import jzero
from helpers.planted_faults import Net, config, rows
from jzero.loss_scale import NonFiniteError


def train(bad):
    engine.train_batch(bad)
    try:
        engine.train_batch(rows(2, 8))
    except NonFiniteError as error:
        jzero.log_dist("found " + str(error).replace(chr(10), "; "), ranks=[-1])


engine = jzero.initialize(model=Net(), config=config(0, gradient_accumulation_steps=2))[0]
engine.train_batch(rows(0, 8))
bad = rows(1, 8)
bad["x"][6] = np.nan  # of process 1: its rows are 4 to 7, and its second micro-batch is 6 and 7
train(bad)
w = engine.state.params["stack"]["w"]
copies = [shard.data for shard in w.addressable_shards]
if jax.process_index() == 1:
    part = np.array(copies[0])
    part[1] = np.nan
    copies[0] = jax.device_put(part, copies[0].device)
engine.state.params["stack"]["w"] = jax.make_array_from_single_device_arrays(w.shape, w.sharding, copies)
train(rows(0, 8))
"""


def test_both_processes_name_the_row_and_the_process(start, tmp_path):
    job = start(*CPU, 2, "worker.py", program=NON_FINITE, env=QUICK).ended()
    found = [re.findall(rf"^\[{rank}\] found (.*)$", job.output, re.M) for rank in (0, 1)]
    assert found[0] == found[1], job.output
    row, copy = found[0]
    for text, words in (
        (row, "step 2: the loss is nan"),
        (row, "first in the forward pass: the prefix"),
        (row, "in micro-batch 1 of 2, on replica 1: row 6 of the global batch"),
        (copy, "step 2: the loss is nan"),
        (copy, "parameter stack/w, layer 1, is not finite on device 1 (process 1); the same part is"),
        (copy, "finite on device 0 (process 0)"),
        (copy, "first in the forward pass: layer 1 of 4"),
    ):
        assert words in text
    assert (tmp_path / "saved" / "step2" / "README.md").exists()
