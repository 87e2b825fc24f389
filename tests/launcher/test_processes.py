"""Programs of several real processes: the numbers of one process, and the same error instead of a hang."""

import json
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jobs import QUICK
from workers import CPU

from jzero.distributed import host_collectives

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
def run(start):
    """Run a program; return the job and the lines that each rank prints: rank -> {name: text}."""

    def run(program, size=2, **env):
        job = start(*CPU, size, "worker.py", program=HEAD + program, env=QUICK | env).ended()
        found = re.findall(r"^\[(\d)\] (\w+): (.*)$", job.output, re.M)
        return job, {r: {name: text for number, name, text in found if number == str(r)} for r in range(size)}

    return run


def test_processes_that_differ(run):
    job, said = run("""
tried("lr", lambda: engine(optimizer={"type": "Adam", "params": {"lr": 1e-3 * (1 + rank)}}).train_batch(rows(4)))
tried("mesh", lambda: engine(mesh={"data": 1 + rank, "zero": 2 - rank}).train_batch(rows(4)))
tried("model", lambda: engine(hidden=8 + rank).train_batch(rows(4)))
one = engine()
tried("shape", lambda: one.eval_batch(rows(4 * (1 + rank))))
tried("good", lambda: float(one.train_batch(rows(4))) == float(one.train_batch(rows(4))))
tried("mine", lambda: float(one.train_batch(rows(2))) > 0)
tried("size", lambda: one.train_batch(rows(3)))
tried("predict", lambda: one.predict(rows(3 + rank)[0]))  # both are padded to 4 rows
evaluate = jzero.make_eval_step(one.step_fn.model, lambda model, batch: batch[1], one.config)
tried("evaluate", lambda: evaluate(one.state, (rows(4)[0], np.zeros(4, ["int32", "float32"][rank]))))
""")
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
    _, said = run("""
one = engine(gradient_accumulation_steps=2)
data = iter([rows(2)] * (4 if rank == 0 else 3))
tried("first", lambda: float(one.train_batch(data)) > 0)
tried("second", lambda: one.train_batch(data))
""")
    for rank in (0, 1):
        assert said[rank]["first"] == "True"
        assert "the iterator of process 1 ended after 1 of 2 micro-batches" in said[rank]["second"]


@pytest.mark.slow
def test_evaluation_of_micro_batches(run):
    """Each process passes its own rows, or jzero's loader passes the rows of all."""
    _, said = run("""
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
    assert said[0] == said[1] == {"own": "True", "alike": "True", "loader": "True"}


@pytest.mark.slow
def test_a_process_that_never_comes(run):
    program = """
if rank == 2:
    while not (os.path.exists("gave up 0") and os.path.exists("gave up 1")):
        time.sleep(0.1)
    os.environ["JZERO_TIMEOUT"] = "3"
tried("joined", jzero.init_distributed)
open(f"gave up {rank}", "w").close()
"""
    _, said = run(program, size=3, JZERO_TIMEOUT="15")
    for rank in (0, 1):
        assert said[rank]["joined"].startswith("error: rank 2 of 3 did not come to 127.0.0.1:")
    assert "timed out after 3 s waiting for process 0" in said[2]["joined"]


@pytest.mark.slow
def test_jax_that_was_used_before(run):
    _, said = run('jax.devices()\ntried("joined", jzero.init_distributed)\n')
    for rank in (0, 1):
        assert "call jzero.init_distributed() at the top of the script" in said[rank]["joined"]


PROGRAM = '''
import json
import jax, jax.numpy as jnp, numpy as np, optax, pytest
from flax import nnx
from helpers.steps import settings
import jzero


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def loss_fn(model, batch, extra):
    logits, labels = model(batch["x"]), batch["y"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * extra["weight"]
    hits = (logits.argmax(-1) == labels) & (labels > 0)
    far = jzero.all_gather(logits).mean() * jzero.axis_index()
    return losses.mean(), {"accuracy": jzero.Mean(hits.sum(), (labels > 0).sum()), "far": far}


def train(devices=None):
    rng = np.random.default_rng(0)
    config = settings(16, 3, accum=2, ema={"decay": 0.9})  # SGD: Adam amplifies the noise in gradients of 0
    model = jzero.from_flax(Net, loss_fn, has_aux=True)
    x = rng.normal(size=(11, 4)).astype("float32")
    engine = jzero.initialize(model=model, config=config, mesh=jzero.make_mesh(devices=devices))[0]
    found = []
    for i in range(3):
        batch = {"x": rng.normal(size=(16, 4)).astype("float32"), "y": rng.integers(0, 3, 16).astype("int32")}
        engine.train_batch(batch, extra={"weight": 1.0 + i})
        found.append({name: float(x) for name, x in engine.metrics.items()})
    engine.eval_batch(batch, {"weight": 1.0}, ema=True)
    found.append({name: float(x) for name, x in engine.eval_metrics.items()})
    _, metrics = engine.step_fn.gradients(engine.state, batch, {"weight": 2.0})
    found.append({name: float(x) for name, x in metrics.items()})
    found.append({str(i): float(v) for i, v in enumerate(engine.predict(x, numpy=True).ravel())})
    return [*found, *outside(devices), text(devices), refused(devices)]


class Bigrams(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(8, 8, rngs=rngs)

    def make_cache(self, rows, length, dtype):
        return jnp.zeros((rows, 0), dtype)

    def decode(self, tokens, column, padding, cache):
        return self.table(tokens[:, -1]), cache


def text(devices):
    """More rows than the processes divide."""
    model = jzero.from_flax(Bigrams, lambda model, batch: model.table(batch).mean())
    engine = jzero.initialize(model=model, config=settings(2, 3), mesh=jzero.make_mesh(devices=devices))[0]
    prompts, options = np.arange(6).reshape(3, 2), {"rng": jax.random.key(1), "temperature": 0.5, "numpy": True}
    return {str(i): float(x) for i, x in enumerate(engine.generate(prompts, 5, **options).ravel())}


class Checked(Bigrams):
    def check_batch(self, batch):
        assert len(batch) == 2 // jax.process_count()
        if 7 in batch:
            raise jzero.ConfigError("has a 7")
        if 6 in batch:
            raise KeyError("has a 6")


def refused(devices):
    """A first batch in which the rows of one process are wrong."""
    model = jzero.from_flax(Checked, lambda model, batch: model.table(batch).mean())
    engine = jzero.initialize(model=model, config=settings(2), mesh=jzero.make_mesh(devices=devices))[0]
    here = jax.process_count() == 1 or jax.process_index() == 1  # whose rows are wrong
    of_a_key = (KeyError, "'has a 6'") if here else (
        jzero.ConfigError, "the first batch: process 1: KeyError: 'has a 6'")
    for last, expected in ((7, (jzero.ConfigError, "has a 7")), (6, of_a_key)):
        with pytest.raises(Exception) as caught:
            engine.train_batch(np.array([[1, 2], [3, last]]))
        assert (caught.type, str(caught.value)) == expected
    return {"refused": 1.0}


def criterion(outputs, labels):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


def outside(devices):
    """A criterion outside of the model: the outputs of all rows and of a process's own, and a rate that changes.

    The parameters come from a file.
    """
    from jzero.step.batch import rows_of_this_process

    mesh = jzero.make_mesh(devices=devices)
    engine = jzero.initialize(model=Net, criterion=criterion, config=settings(8, 3), mesh=mesh, params=PARAMS)[0]
    mine = rows_of_this_process(engine.step_fn.batch_sharding, 8)
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(8, 4)).astype("float32"), rng.integers(0, 3, 8).astype("int32")
    found = []
    for lr in (0.1, 0.3):
        engine.set_lr(lr)
        whole = np.asarray(engine(x))
        outputs = engine(x[mine])
        np.testing.assert_array_equal(outputs, whole[mine])
        loss = engine.loss(outputs, labels[mine])
        engine.backward(loss)
        engine.step()
        found.append({"loss": loss.item(), **{str(i): float(v) for i, v in enumerate(whole.ravel())}})
    return found
'''


@pytest.mark.slow
def test_two_processes_compute_what_one_does(start, tmp_path):
    space = {"PARAMS": str(tmp_path / "params")}
    exec(PROGRAM, space)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(space["PARAMS"], nnx.state(space["Net"](nnx.Rngs(3))))
    expected = space["train"](jax.devices()[:2])
    last = "found = train()\njzero.log_dist(json.dumps(found), ranks=[-1])"
    job = start(*CPU, 2, "worker.py", program=f"PARAMS = 'params'\n{PROGRAM}\n{last}\n", env=QUICK).ended()
    lines = re.findall(r"^\[\d\] (\[\{.*)$", job.output, re.M)
    assert len(lines) == 2
    for line in lines:
        for mine, plain in zip(json.loads(line), expected, strict=True):
            assert mine.keys() == plain.keys()
            np.testing.assert_allclose(list(mine.values()), list(plain.values()), rtol=1e-5, atol=1e-7)


def test_an_error_of_any_type_is_shared(monkeypatch):
    """Before it is raised: the other processes would wait for this one."""
    told = []
    monkeypatch.setattr(host_collectives, "share_problem", lambda *problem: told.append(problem))
    with pytest.raises(KeyError):
        host_collectives.run_on_all("reading", lambda: {}["a"])
    assert told == [("reading", "lasting:reading: process 0: KeyError: 'a'")]
