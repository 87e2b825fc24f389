"""Programs of several real processes: they agree, or raise the same error instead of hanging."""

import re

import pytest
from jobs import QUICK, Command

pytestmark = pytest.mark.processes

HEAD = """
import os, sys, time
import jax, numpy as np
import jzero
from models.mlp import MLP, cross_entropy

rank = jzero.get_rank()

def engine(hidden=8, batch=4, **config):
    config = {"train_batch_size": batch, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}} | config
    config["progress"] = {"summary": False}  # only rank 0 has one
    model = jzero.from_flax(lambda rngs: MLP(8, hidden, 2, rngs=rngs), cross_entropy)
    return jzero.initialize(model=model, config=config)[0]

def rows(n):
    return np.ones((n, 8), "float32"), np.zeros(n, "int32")

def tried(name, f):
    try:
        print(f"\\n{name}: {f()}\\n", end="", flush=True)
    except jzero.ConfigError as error:
        print(f"\\n{name}: error: {error}\\n", end="", flush=True)
"""


@pytest.fixture
def run(tmp_path):
    """Run a program; return the job and the lines that each rank prints: rank -> {name: text}."""

    def run(program, size=2, **env):
        (tmp_path / "worker.py").write_text(HEAD + program)
        job = Command("--platform", "cpu", "--num_gpus", size, "worker.py", cwd=tmp_path, env=QUICK | env)
        try:
            job.code = job.wait()
        finally:
            job.end()
        found = re.findall(r"^\[(\d)\] (\w+): (.*)$", job.output, re.M)
        return job, {r: {name: text for number, name, text in found if number == str(r)} for r in range(size)}

    return run


def test_processes_that_differ(run):
    job, said = run("""
tried("lr", lambda: engine(optimizer={"type": "Adam", "params": {"lr": 1e-3 * (1 + rank)}}).train_batch(rows(4)))
tried("mesh", lambda: engine(mesh={"data": 1 + rank, "zero": 2 - rank}).train_batch(rows(4)))
tried("model", lambda: engine(hidden=8 + rank).train_batch(rows(4)))
tried("shape", lambda: engine().eval_batch(rows(4 * (1 + rank))))
one = engine()
tried("good", lambda: float(one.train_batch(rows(4))) == float(one.train_batch(rows(4))))
tried("mine", lambda: float(one.train_batch(rows(2))) > 0)
tried("size", lambda: one.train_batch(rows(3)))
tried("predict", lambda: one.predict(rows(3 + rank)[0]))  # both are padded to 4 rows
evaluate = jzero.make_eval_step(one.step_fn.model, lambda model, batch: batch[1], one.config)
tried("evaluate", lambda: evaluate(one.state, (rows(4)[0], np.zeros(4, ["int32", "float32"][rank]))))
""")
    assert job.code == 0, job.errors
    assert said[0].keys() == said[1].keys()
    for name, words in {
        "lr": "the processes differ in config.optimizer.params.lr: 0.001 on rank 0; 0.002 on rank 1",
        "mesh": "- train step: the processes differ in config.mesh.data: 1 on rank 0; 2 on rank 1",
        "shape": "the processes differ in batch.0",
        "predict": 'the processes differ in call: "predictions of 3 rows" on rank 0; "predictions of 4 rows" on rank 1',
        "evaluate": 'the processes differ in batch.0/1: "int32[4]" on rank 0; "float32[4]" on rank 1',
    }.items():
        for rank in (0, 1):
            assert words in said[rank][name]
    for rank in (0, 1):
        assert "parameters.fc1/" in job.output
        assert said[rank]["good"] == "False"
        assert said[rank]["mine"] == "True"
        assert "its leading dimension must be 4, or 2 on this process" in said[rank]["size"]


@pytest.mark.slow
def test_data_that_ends(run):
    job, said = run("""
one = engine(gradient_accumulation_steps=2)
data = iter([rows(2)] * (4 if rank == 0 else 3))
tried("first", lambda: float(one.train_batch(data)) > 0)
tried("second", lambda: one.train_batch(data))
""")
    assert job.code == 0, job.errors
    for rank in (0, 1):
        assert said[rank]["first"] == "True"
        assert "the iterator of process 1 ended after 1 of 2 micro-batches" in said[rank]["second"]


@pytest.mark.slow
def test_evaluation_of_micro_batches(run):
    """Each process passes its own rows, or jzero's loader passes the rows of all."""
    job, said = run("""
x, y = np.arange(64.0, dtype="float32").reshape(8, 8) / 64, np.arange(8, dtype="int32") % 2
one = engine(batch=8, gradient_accumulation_steps=2)
step, loader = one.step_fn, None
whole = float(one.eval_batch((x, y)))
mine = [(x[i : i + 2], y[i : i + 2]) for i in (2 * rank, 4 + 2 * rank)]
tried("own", lambda: abs(float(one.eval_batch(iter(mine))) / whole - 1) < 1e-6)
tried("alike", lambda: abs(float(one.eval_batch(iter([(x[:4], y[:4]), (x[4:], y[4:])]))) / whole - 1) < 1e-6)
loader = jzero.data.DataLoader((x, y), step)
tried("loader", lambda: abs(float(one.eval_batch(iter(loader))) / whole - 1) < 1e-6)
""")
    assert job.code == 0, job.errors
    for rank in (0, 1):
        assert said[rank] == {"own": "True", "alike": "True", "loader": "True"}


@pytest.mark.slow
def test_a_process_that_never_comes(run):
    _, said = run(
        """
if rank == 2:
    while not (os.path.exists("gave up 0") and os.path.exists("gave up 1")):
        time.sleep(0.1)
    os.environ["JZERO_TIMEOUT"] = "3"
tried("joined", jzero.init_distributed)
open(f"gave up {rank}", "w").close()
""",
        size=3,
        JZERO_TIMEOUT="15",
    )
    for rank in (0, 1):
        assert said[rank]["joined"].startswith("error: rank 2 of 3 did not come to 127.0.0.1:")
    assert "timed out after 3 s waiting for process 0" in said[2]["joined"]


@pytest.mark.slow
def test_jax_that_was_used_before(run):
    _, said = run("""
jax.devices()
tried("joined", jzero.init_distributed)
""")
    for rank in (0, 1):
        assert "call jzero.init_distributed() at the top of the script" in said[rank]["joined"]
