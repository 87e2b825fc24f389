"""What surrounds training with the axis `expert`: checkpoints between layouts, evaluation, predictions, text, bf16."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.mixture_models import BATCH, CONFIG, batches, initial, make_step, model
from helpers.sampling import some

import jzero
from jzero.tree import named

QUIET = dataclasses.replace(CONFIG, mixture=dataclasses.replace(CONFIG.mixture, balance=0.0))
FROM = {"expert": 2, "zero": 2}
LAYOUTS = [{"expert": 4, "zero": 1}, {"expert": 2, "tensor": 2, "zero": 1}, {"zero": 4}, {"expert": 1, "zero": 1}]


def make_engine(layout):
    settings = {
        "train_batch_size": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "mesh": layout,
        "steps_per_print": None,
    }  # fmt: skip
    devices = jax.devices()[: int(np.prod(list(layout.values())))]
    mesh = jzero.make_mesh(settings, devices=devices)
    engine, *_ = jzero.initialize(model=model(QUIET), config=settings, mesh=mesh, rng=jax.random.key(1))
    return engine


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of three steps, saved after the second: (directory, third loss, parameters)."""
    directory, engine = tmp_path_factory.mktemp("run"), make_engine(FROM)
    for batch in batches()[:2]:
        engine.train_batch(batch)
    engine.save_checkpoint(directory)
    loss = float(engine.train_batch(batches()[2]))
    return directory, loss, named(jax.device_get(engine.state.params))


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[:2]), ids=str)
def test_a_checkpoint_continues_on_another_layout(layout, straight):
    directory, loss, params = straight
    engine = make_engine(layout)
    engine.load_checkpoint(directory)
    assert float(engine.train_batch(batches()[2])) == pytest.approx(loss, rel=1e-6)
    for name, x in named(jax.device_get(engine.state.params)).items():
        assert np.abs(x - params[name]).max() < 5e-6 * max(np.abs(params[name]).max(), 1e-2), name


@pytest.mark.slow
def test_evaluation_predictions_and_text_of_one_device():
    """Every device along `expert` evaluates rows of its own, and results come in the order of the batch."""
    batch, prompts = batches()[0], batches()[0]["inputs"][:8]
    steps = [make_step(QUIET, **layout) for layout in ({"expert": 2, "zero": 2, "stage": 3}, {"expert": 1})]
    states = [step.init(jax.random.key(0), initial(QUIET)) for step in steps]
    ours, plain = ((step, state) for step, state in zip(steps, states, strict=True))
    a, b = (step.predict(state, batch) for step, state in (ours, plain))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    a, b = (step.evaluate(state, batch) for step, state in (ours, plain))
    assert float(a[0]) == pytest.approx(float(b[0]), rel=1e-6)
    a, b = (step.generate(state, prompts, 6, numpy=True) for step, state in (ours, plain))
    np.testing.assert_array_equal(a, b)
    assert a.shape == (8, prompts.shape[1] + 6)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 1.0])
def test_bf16_stays_beside_fp32(factor):
    mixture = dataclasses.replace(QUIET.mixture, capacity_factor=factor)
    config = dataclasses.replace(QUIET, mixture=mixture)
    losses = []
    for more in ({}, {"bf16": {"enabled": True}}):
        step = make_step(config, expert=2, zero=2, stage=2, more=more)
        state, seen = step.init(jax.random.key(0), initial(config)), []
        for batch in batches():
            state, metrics = step(state, batch)
            seen.append(float(metrics["loss"]))
        losses.append(seen)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)  # bf16 has 8 bits of mantissa
