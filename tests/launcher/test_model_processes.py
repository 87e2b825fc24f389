"""Metrics, BatchNorm and what goes beside the batch in a job of two processes: the numbers are those of one process."""

import json
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jobs import QUICK, Command

from jzero.distributed import host_collectives

pytestmark = pytest.mark.processes

PROGRAM = '''
import json
import jax, jax.numpy as jnp, numpy as np, optax, pytest
from flax import nnx
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
    config = {
        "train_batch_size": 16, "gradient_accumulation_steps": 2, "ema": {"decay": 0.9},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},  # Adam amplifies the noise in gradients of 0
    }
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
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = jzero.initialize(model=model, config=config, mesh=jzero.make_mesh(devices=devices))[0]
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
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = jzero.from_flax(Checked, lambda model, batch: model.table(batch).mean())
    engine = jzero.initialize(model=model, config=config, mesh=jzero.make_mesh(devices=devices))[0]
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

    config = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    mesh = jzero.make_mesh(devices=devices)
    engine = jzero.initialize(model=Net, criterion=criterion, config=config, mesh=mesh, params=PARAMS)[0]
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
def test_two_processes_compute_what_one_does(tmp_path):
    space = {"PARAMS": str(tmp_path / "params")}
    exec(PROGRAM, space)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(space["PARAMS"], nnx.state(space["Net"](nnx.Rngs(3))))
    expected = space["train"](jax.devices()[:2])
    (tmp_path / "worker.py").write_text(
        f"PARAMS = 'params'\n{PROGRAM}\nfound = train()\njzero.log_dist(json.dumps(found), ranks=[-1])\n"
    )
    job = Command("--platform", "cpu", "--num_gpus", 2, "worker.py", cwd=tmp_path, env=QUICK)
    try:
        assert job.wait() == 0, job.errors
    finally:
        job.end()
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
