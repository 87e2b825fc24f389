"""Programs of several real processes: the numbers of one process, and the same error instead of a hang.

The fault is where the test puts it.
"""

import json
import re
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers.refusals import refuses
from helpers.tensor_models import reference
from jobs import CPU, MEET, QUICK, TRIED, Command, heard_at, said

import jzero
from jzero.distributed import host_collectives, last_words

pytestmark = pytest.mark.processes

HEAD = """
import numpy as np
from flax import nnx
import jzero

rank = jzero.get_rank()

def engine(hidden=8, batch=4, layer=nnx.Linear, **config):
    config = {"train_batch_size": batch, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}} | config
    config["progress"] = {"summary": False}  # only rank 0 has one
    squares = lambda model, batch: ((model(batch[0]).mean(1) - batch[1]) ** 2).mean()
    model = jzero.from_flax(lambda rngs: layer(8, hidden, rngs=rngs), squares)
    return jzero.initialize(model=model, config=config)[0]

def rows(n):
    return np.ones((n, 8), "float32"), np.zeros(n, "int32")
"""


DIFFERENT = """
adam = {"type": "Adam", "params": {"lr": 1e-3 * (1 + rank)}}
tried("lr", lambda: engine(hidden=8 + rank, optimizer=adam).train_batch(rows(4)))
tried("mesh", lambda: engine(mesh={"data": 1 + rank, "zero": 2 - rank}).train_batch(rows(4)))
class Checked(nnx.Linear):
    def check_batch(self, batch):
        assert len(batch[0]) == 2  # this process's rows
        if rank:  # whose rows are wrong
            raise jzero.ConfigError("has a 7")

tried("first", lambda: engine(layer=Checked).train_batch(rows(4)))
class Keyed(nnx.Linear):
    def check_batch(self, batch):
        if rank:
            raise KeyError("has a 6")

def key():
    try:
        engine(layer=Keyed).train_batch(rows(4))
    except KeyError as error:
        return repr(error)

tried("key", key)
one = engine()
tried("shape", lambda: one.eval_batch(rows(4 * (1 + rank))))
tried("good", lambda: float(one.train_batch(rows(4))) == float(one.train_batch(rows(4))))
tried("mine", lambda: float(one.train_batch(rows(2))) > 0)
tried("size", lambda: one.train_batch(rows(3)))
tried("end", lambda: one.train_batch(iter([rows(4)] * (1 - rank))))
tried("predict", lambda: one.predict(rows(3 + rank)[0]))  # both are padded to 4 rows
evaluate = jzero.make_eval_step(one.step_fn.model, lambda model, batch: batch[1], one.config)
tried("evaluate", lambda: evaluate(one.state, (rows(4)[0], np.zeros(4, ["int32", "float32"][rank]))))
"""


@pytest.fixture(scope="module")
def different(tmp_path_factory):
    """A job whose two processes differ, after its end, and where they listened before they met and after."""
    path = tmp_path_factory.mktemp("different")
    (path / "worker.py").write_text(MEET + HEAD + TRIED + DIFFERENT)
    job = Command(*CPU, 2, "worker.py", cwd=path, env=QUICK)
    try:
        heard = heard_at(job, path)
        return job.ended(), heard
    finally:
        job.end()


def test_one_machine(different):
    """Its processes listen at loopback alone, before they meet and after."""
    job, heard = different
    assert heard == ({"127.0.0.1"}, {"127.0.0.1"})
    assert job.output.count("joined lo") == 2


def test_processes_that_differ(different):
    job, _ = different
    told = said(job)
    assert told[0].keys() == told[1].keys()
    expected = {
        "lr": "the processes differ in config.optimizer.params.lr: 0.001 on rank 0; 0.002 on rank 1",
        "mesh": "- train step: the processes differ in config.mesh.data: 1 on rank 0; 2 on rank 1",
        "first": "ConfigError: has a 7",
        "shape": "the processes differ in batch.0",
        "predict": 'the processes differ in call: "predictions of 3 rows" on rank 0; "predictions of 4 rows" on rank 1',
        "evaluate": 'the processes differ in batch.0/1: "int32[4]" on rank 0; "float32[4]" on rank 1',
        "size": "its leading dimension must be 4, or 2 on this process",
        "end": "the iterator of process 1 ended after 0 of 1 micro-batches",
    }
    for texts in told:
        assert {name: words for name, words in expected.items() if words not in texts[name]} == {}, texts
        assert (texts["good"], texts["mine"]) == ("False", "True")
    assert "parameters.kernel" in job.output
    assert "the first batch: process 1: KeyError: 'has a 6'" in told[0]["key"]
    assert told[1]["key"] == "KeyError('has a 6')"


@pytest.mark.slow
def test_the_process_whose_data_are_slow_is_named(start):
    program = """
import time
def batches():
    while True:
        time.sleep(0.5 * rank)
        yield rows(4)

one, data = engine(straggler_check={"every": 4}), batches()
for _ in range(4):
    one.train_batch(data)
"""
    job = start(*CPU, 2, "worker.py", program=HEAD + program, env=QUICK).ended()
    (text,) = re.findall(r"jzero: step 4: straggler: (.*)$", job.output, re.M)
    data = re.match(r"process 1 on \S+: its devices wait .* elsewhere\): data ([\d.]+)", text)
    assert float(data[1]) >= 250.0  # of 500; the devices may still work on the step before


def test_jax_that_was_used_before(monkeypatch):
    """The error is the process's last line: the hook for it comes first."""
    jax.devices()
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", before)
    monkeypatch.setattr(last_words, "_installed", False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    refuses(jzero.init_distributed, r"call jzero.init_distributed\(\) at the top of the script")
    assert sys.excepthook is not before


PROGRAM = '''
import json
import jax, numpy as np, optax
from flax import nnx
import jzero

jzero.init_distributed()  # before a helper that uses JAX
from helpers.named_models import model_of
from helpers.plain_flax import Normed, cross_entropy
from helpers.steps import settings
from models.llama import LlamaConfig


def loss_fn(model, batch, extra):
    logits, labels = model(batch["x"]), batch["y"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * extra["weight"]
    hits = (logits.argmax(-1) == labels) & (labels > 0)
    far = jzero.all_gather(logits).mean() * jzero.axis_index()
    return losses.mean(), {"accuracy": jzero.Mean(hits.sum(), (labels > 0).sum()), "far": far}


def train(devices=None):
    rng = np.random.default_rng(0)
    config = settings(16, 3, accum=2, ema={"decay": 0.9})  # SGD: Adam amplifies the noise in gradients of 0
    model = jzero.from_flax(Normed, loss_fn, has_aux=True)
    x = rng.normal(size=(11, 6)).astype("float32")
    engine = jzero.initialize(model=model, config=config, mesh=jzero.make_mesh(devices=devices))[0]
    found = []
    for i in range(3):
        batch = {"x": rng.normal(size=(16, 6)).astype("float32"), "y": rng.integers(0, 3, 16).astype("int32")}
        engine.train_batch(batch, extra={"weight": 1.0 + i})
        found.append({name: float(x) for name, x in engine.metrics.items()})
    engine.eval_batch(batch, {"weight": 1.0}, ema=True)
    found.append({name: float(x) for name, x in engine.eval_metrics.items()})
    _, metrics = engine.step_fn.gradients(engine.state, batch, {"weight": 2.0})
    found.append({name: float(x) for name, x in metrics.items()})
    found.append({str(i): float(v) for i, v in enumerate(engine.predict(x, numpy=True).ravel())})
    return [*found, *outside(devices), text(devices)]


def text(devices):
    """More rows than the processes divide."""
    model = model_of(LlamaConfig(1, 16, 2, 1, 24, vocab_size=8))
    engine = jzero.initialize(model=model, config=settings(2, 3), mesh=jzero.make_mesh(devices=devices))[0]
    prompts, options = np.arange(6).reshape(3, 2), {"rng": jax.random.key(1), "temperature": 0.5, "numpy": True}
    return {str(i): float(x) for i, x in enumerate(engine.generate(prompts, 5, **options).ravel())}


def outside(devices):
    """A criterion outside of the model: the outputs of all rows and of a process's own, and a rate that changes.

    The parameters come from a file.
    """
    from jzero.step.batch import rows_of_this_process

    mesh = jzero.make_mesh(devices=devices)
    engine = jzero.initialize(model=Normed, criterion=cross_entropy, config=settings(8, 3), mesh=mesh, params=PARAMS)[0]
    mine = rows_of_this_process(engine.step_fn.batch_sharding, 8)
    rng = np.random.default_rng(1)
    x, labels = rng.normal(size=(8, 6)).astype("float32"), rng.integers(0, 3, 8).astype("int32")
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
        checkpointer.save(space["PARAMS"], nnx.state(space["Normed"](nnx.Rngs(3))))
    expected, last = space["train"](jax.devices()[:2]), "jzero.log_dist(json.dumps(train()), ranks=[-1])"
    job = start(*CPU, 2, "worker.py", program=f"PARAMS = 'params'\n{PROGRAM}\n{last}\n", env=QUICK).ended()
    lines = re.findall(r"^\[\d\] (\[\{.*)$", job.output, re.M)
    assert len(lines) == 2
    for line in lines:
        for mine, plain in zip(json.loads(line), expected, strict=True):
            assert mine.keys() == plain.keys()
            np.testing.assert_allclose(list(mine.values()), list(plain.values()), rtol=1e-5, atol=1e-7)


GROUPS = """
import json
import jax, numpy as np
import jzero

jzero.init_distributed()
from helpers.tensor_models import batches, initial, make_step
from jzero.step.batch import rows_of_this_process

step = make_step("llama", **{layout!r})
state, seen = step.init(jax.random.key(0), initial("llama")), []
for i, batch in enumerate(batches()):
    mine = rows_of_this_process(step.batch_sharding, len(batch["inputs"]))
    state, metrics = step(state, {{name: x[mine] for name, x in batch.items()}} if i else batch)
    seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
jzero.log_dist(json.dumps([len(mine), seen]), ranks=[-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rows"),
    [({"zero": 2, "context": 2, "stage": 3, "accum": 2}, 8), ({"pipe": 2, "tensor": 2, "accum": 2}, 16)],
    ids=["context", "pipeline of groups"],
)
def test_one_device_computes_the_same(start, layout, rows):
    """Devices of several processes act as one: each process passes its rows."""
    job = start(*CPU, 4, "worker.py", program=GROUPS.format(layout=layout), env=QUICK).ended()
    lines = [json.loads(line) for line in re.findall(r"^\[\d\].*?(\[\d+, \[\[.*)$", job.output, re.M)]
    assert [mine for mine, _ in lines] == [rows] * 4
    for _, seen in lines:
        np.testing.assert_allclose(seen, reference("llama")[0], rtol=1e-6)


NON_FINITE = """
import numpy as np
import jzero
from helpers.planted_faults import Net, config, rows
from jzero.loss_scale import NonFiniteError

engine = jzero.initialize(model=Net(), config=config(0, gradient_accumulation_steps=2))[0]
engine.train_batch(rows(0, 8))
bad = rows(1, 8)
bad["x"][6] = np.nan  # of process 1: its rows are 4 to 7, and its second micro-batch is 6 and 7
engine.train_batch(bad)
try:
    engine.train_batch(rows(2, 8))
except NonFiniteError as error:
    jzero.log_dist("found " + str(error).replace(chr(10), "; "), ranks=[-1])
"""


@pytest.mark.slow
def test_both_processes_name_the_row(start, tmp_path):
    job = start(*CPU, 2, "worker.py", program=NON_FINITE, env=QUICK).ended()
    found = [re.findall(rf"^\[{rank}\] found (.*)$", job.output, re.M) for rank in (0, 1)]
    assert found[0] == found[1], job.output
    (row,) = found[0]
    assert "first in the forward pass: the prefix" in row
    assert "in micro-batch 1 of 2, on replica 1: row 6 of the global batch" in row
    assert (tmp_path / "saved" / "step2" / "README.md").exists()


def test_an_error_of_any_type_is_shared(monkeypatch):
    """Before it is raised: the other processes would wait for this one."""
    told = []
    monkeypatch.setattr(host_collectives, "share_problem", lambda *problem: told.append(problem))
    with pytest.raises(KeyError):
        host_collectives.run_on_all("reading", lambda: {}["a"])
    assert told == [("reading", "lasting:reading: process 0: KeyError: 'a'")]
