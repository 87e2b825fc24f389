"""Tensor parallelism: what each device holds, checkpoints, a loss over all replicas. Layouts: `test_one_device`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tensor_models import batches, initial, make_step

import jzero
from jzero.checkpoint import restore, save
from jzero.tree import named


def test_each_device_holds_its_part():
    """Of a divided weight 1 / (tensor x zero), of another 1 / zero."""
    step = make_step("nnx", tensor=2, zero=2, stage=3)
    parts = {
        name: np.prod(sharding.shard_shape(shape.shape)) / np.prod(shape.shape)
        for (name, shape), sharding in zip(
            named(step.state_shapes.params).items(), jax.tree.leaves(step.state_shardings.params), strict=True
        )
    }
    whole = {name for name in parts if "norm" in name or name.endswith(("out/bias", "down/bias"))}
    assert len(whole) == 8
    assert parts == {name: 1 / 2 if name in whole else 1 / 4 for name in parts}


@pytest.mark.slow
def test_evaluation_prediction_and_checkpoints(tmp_path):
    """A checkpoint of tensor 2 x zero 2 continues on one device; evaluation and predictions are those of one device."""
    step, one = make_step("linen", tensor=2, zero=2, stage=3), make_step("linen", dimensions={})
    first, second, third = batches()
    state, _ = step(step.init(jax.random.key(0), initial("linen")), first)
    save(state, tmp_path / "saved").wait()
    alone = restore(tmp_path / "saved", one.state_shardings, shapes=one.state_shapes)
    np.testing.assert_allclose(step.evaluate(state, second), one.evaluate(alone, second), rtol=1e-6)
    tokens = second["inputs"]
    np.testing.assert_allclose(step.predict(state, tokens), one.predict(alone, tokens), rtol=1e-4, atol=1e-5)
    _, found = step(state, third)
    _, expected = one(alone, third)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)


class Contrastive:
    """Every row against the rows of all replicas, with dropout: collectives and random numbers inside of a loss."""

    def init(self, rng):
        a, b = jax.random.split(rng)
        return {"up": 0.3 * jax.random.normal(a, (8, 16)), "down": 0.3 * jax.random.normal(b, (16, 8))}

    def loss(self, params, batch, rng):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        if rng is not None:
            hidden = jnp.where(jax.random.bernoulli(jax.random.key(7), 0.7, hidden.shape), hidden / 0.7, 0)
        y = hidden @ params["down"]
        scores = y @ jzero.all_gather(batch["x"]).T
        own = jzero.axis_index() * len(y) + jnp.arange(len(y))
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), own[:, None], 1).mean()


@pytest.mark.slow
def test_a_loss_over_all_replicas_with_dropout():
    """The mask depends on the shape alone, so that one replica of 8 rows and tensor 4 are comparable."""
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    found = []
    for layout in ({}, {"tensor": 4, "dimensions": {"up": 1, "down": 0}}):
        step = make_step(Contrastive(), zero=2, **layout)
        state, metrics = step(step.init(jax.random.key(0)), {"x": x})
        found.append((float(metrics["loss"]), float(metrics["grad_norm"]), *jax.tree.leaves(state.params)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
