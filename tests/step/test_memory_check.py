"""A step that needs more memory than its device has: what is largest, and configurations that fit, compiled."""

import json
import re

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.named_models import model_of
from helpers.refusals import compilations
from helpers.steps import mesh, settings

import jzero
from jzero.config.sizes import ACCUM, MICRO
from jzero.errors import OutOfMemoryError
from jzero.planner.candidates import merged
from jzero.planner.memory import UsableMemory
from jzero.planner.nearest import nearest, ways
from jzero.run import step_memory
from models.llama import preset

ROWS, LENGTH = 16, 64
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
CONFIG = settings(ROWS, 1, optimizer=ADAMW, gradient_clipping=1, train_micro_batch_size_per_gpu=8, steps_per_print=None)
DATA = {name: np.ones((2 * ROWS, LENGTH), np.int32) for name in ("inputs", "labels")}
BATCH = {name: values[:ROWS] for name, values in DATA.items()}


def model():
    return model_of(preset("tiny", num_layers=2))


def limit(patch, size):
    """Let the devices report a limit, which CPUs have none of."""
    patch.setattr(step_memory, "usable_memory_here", lambda: size and UsableMemory(size, size, size, size))


def dense(loss=lambda module, batch: (module(batch["x"]) ** 2).mean()):
    return jzero.from_flax(lambda rngs: nnx.Linear(64, 64, rngs=rngs), loss)


X = {"x": np.ones((ROWS, 64), np.float32)}  # its batch


def peak(config, made=None, batch=BATCH):
    return peak_of(jzero.make_train_step(made or model(), config, mesh=mesh(2)), batch)


def peak_of(step, batch=BATCH):
    stats = step.lower(batch).compile().memory_analysis()
    kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + kept + stats.temp_size_in_bytes


def start(config):
    return jzero.initialize(model=model(), config=config, mesh=mesh(2), training_data=DATA)[0]


@pytest.mark.slow
def test_initialize_names_what_fits_and_it_does(monkeypatch):
    whole = peak(CONFIG)
    limit(monkeypatch, int(0.8 * whole))
    with pytest.raises(OutOfMemoryError) as caught:
        start(CONFIG)
    message = str(caught.value)
    assert message.startswith("the step does not fit: ")
    assert "activations and temporaries" in message  # the parts
    found = re.findall(r"^fits with .*?: (\{.*\})$", message, re.MULTILINE)
    assert found
    for line in found:
        sections = {k: {**CONFIG.get(k, {}), **v} if isinstance(v, dict) else v for k, v in json.loads(line).items()}
        changed = CONFIG | sections
        assert peak(changed) <= 0.8 * whole
        assert changed["train_batch_size"] == ROWS
    engine = start(changed)
    assert np.isfinite(float(engine.train_batch()))


def test_a_loss_that_needs_more_than_the_data(monkeypatch):
    """The step's own batch and `extra` are known at the first step alone: until then no report may trace it."""
    limit(monkeypatch, 2**40)

    def loss(module, batch, extra):
        return jax.numpy.mean((module(batch["x"]) - extra) ** 2)

    config = {"train_batch_size": ROWS, "bf16": {"enabled": True}, "optimizer": ADAMW}
    engine = jzero.initialize(model=dense(loss), config=config, training_data=X, params=random_params(dense()))[0]
    assert np.isfinite(float(engine.train_batch(extra=np.float32(1.0))))


def test_a_check_compiles_nothing_twice(monkeypatch):
    def compiled(size):
        limit(monkeypatch, size)
        compilations.clear()
        jzero.initialize(model=dense(), config=CONFIG, mesh=mesh(2), training_data=X)[0].train_batch()
        return len(compilations)

    compiled(None)  # what is compiled once in a process
    assert compiled(2**40) == compiled(None) > 0


def test_a_step_that_runs_out_of_memory(monkeypatch):
    limit(monkeypatch, 2**40)
    monkeypatch.setattr("jzero.planner.nearest.ways", lambda step: iter([]))  # a test of its own
    engine = jzero.initialize(model=dense(), config=CONFIG, mesh=mesh(2), params=random_params(dense()))[0]
    engine.train_batch(X)

    def run(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")

    monkeypatch.setattr(engine.step_fn, "run", run)
    with pytest.raises(OutOfMemoryError, match="a step ran out of memory") as caught:
        engine.train_batch(X)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def unsharded(stage):
    config = CONFIG | {"zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}
    own = {"mesh": {"data": 2, "zero": 1}}
    return config, jzero.make_train_step(dense(), config | own, mesh=mesh(1, data=2))


def test_copies_become_shards_first(monkeypatch):
    config, step = unsharded(3)
    sharded = {"mesh.data": 1, "mesh.zero": 2}
    fits = peak(merged(config, sharded), dense(), X)
    whole = peak_of(step, X)
    monkeypatch.setattr("jzero.planner.nearest.ways", lambda step: ways(step)[:1])
    assert nearest(step, X, whole, (fits + whole) // 2) == [(sharded, fits)]


def test_more_of_what_is_enough_is_left_out(monkeypatch):
    """A micro-batch of 4 fits, so one of 2 tells nothing; two are enough.

    What needs more anyway is not compiled; what is no policy is left out.
    """
    half, quarter = (dict(zip((MICRO, ACCUM), sizes, strict=True)) for sizes in ((4, 2), (2, 4)))
    full, wrong, more = ({"activation_checkpointing.policy": policy} for policy in ("full", "none of these", "matmuls"))
    candidates = [half, quarter, {"zero_optimization.stage": 0}, wrong, full, more]
    monkeypatch.setattr("jzero.planner.nearest.ways", lambda step: candidates)
    step = jzero.make_train_step(dense(), CONFIG, mesh=mesh(2))
    assert [changes for changes, _ in nearest(step, X, 2**40, 2**40)] == [half, full]


def test_without_a_stage_copies_become_shards_of_one():
    found = list(ways(unsharded(0)[1]))
    assert {"mesh.data": 1, "mesh.zero": 2, "zero_optimization.stage": 1} in found
    assert "mesh.zero" not in found[0]  # a smaller micro-batch costs less
