"""Quantized weights, a model's state and dropout, where groups of devices act as one."""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.oracle import train
from helpers.plain_flax import Normed
from helpers.sampling import keep
from helpers.tensor_models import BATCH, LR, VOCAB, WIDTH, batches, errors, make_step

import jzero
from jzero.tree import named


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_quantized_weights_stay_as_near_as_without_the_axis(axis):
    """int8 codes round losses, norms and parameters as much as they do under ZeRO alone, within a factor of two."""
    layout = {"stage": 3, "zero": 2, "more": {"zero_optimization": {"zero_quantized_weights": True}}, "unroll": False}
    alone, found = (errors("llama", **layout, **more)[:2] for more in ({}, {axis: 2}))
    for mine, plain in zip(found, alone, strict=True):
        assert plain / 4 < mine < 2 * plain


ALL = {"zero": 2, "context": 2, "tensor": 2}


@pytest.mark.parametrize("stage", keep([0, 3], [3]))
def test_batch_norms_statistics(stage):
    """Losses, parameters and statistics of a plain loop in Flax, three SGD steps on one device."""

    def loss(net, batch):
        return ((net(batch["x"]) - batch["y"]) ** 2).mean()

    rng = np.random.default_rng(0)
    batches = [{k: rng.normal(size=(BATCH, n)).astype("float32") for k, n in (("x", 6), ("y", 3))} for _ in range(3)]
    step = make_step(
        jzero.from_flax(Normed, loss), stage=stage, dimensions={"first/kernel": 1, "last/kernel": 0}, **ALL
    )
    net = Normed(nnx.Rngs(0))
    start = nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngState)))
    seen, state = train(step, jax.tree.map(np.asarray, start), batches)
    gradient_of = nnx.jit(nnx.value_and_grad(loss))
    for batch, (found, _) in zip(batches, seen, strict=True):
        expected, gradient = gradient_of(net, batch)
        nnx.update(net, jax.tree.map(lambda w, g: w - LR * g, nnx.state(net, nnx.Param), gradient))
        assert found == pytest.approx(float(expected), rel=1e-6)
    whole = named(nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngState))))
    assert {"norm/mean", "norm/var"} == set(step.model.state)
    for name, x in named(state.params).items():
        np.testing.assert_allclose(x, whole[name], rtol=1e-5, atol=1e-6, err_msg=name)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return x + self.down(self.drop(nnx.gelu(self.up(x))))


@pytest.mark.slow
def test_dropout_draws_the_masks_of_one_device():
    """A mask belongs to the micro-batch, not to the devices that share it: the same with and without the axes."""
    table = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0, "embedding": 0}
    subject = jzero.from_flax(Dropping, lambda net, batch: (net(batch["inputs"]) ** 2).mean())
    steps = [make_step(subject, stage=3, zero=2), make_step(subject, stage=3, dimensions=table, **ALL)]
    np.testing.assert_allclose(*(train(step, None, batches())[0] for step in steps), rtol=1e-6)
