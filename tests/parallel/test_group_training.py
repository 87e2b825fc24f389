"""What a training loop adds, where groups of devices act as one: clipping, AdamW, frozen leaves, dropout, fp16, Muon.

The oracles are plain JAX and optax on one device, with the same weights and batches.
"""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.sampling import keep
from helpers.tensor_models import BATCH, DIMENSIONS, VOCAB, WIDTH, batches, initial, model, reference

import jzero
from jzero.tree import named

MESH = {"zero": 2, "context": 2, "tensor": 2}


def make_step(subject, table, mesh=MESH, **config):
    config = {
        "train_batch_size": BATCH, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"dimensions": table}, **config,
    }  # fmt: skip
    return jzero.make_train_step(subject, config, mesh=jzero.make_mesh(**mesh, devices=jax.devices()))


def train(step, params):
    state, seen = step.init(jax.random.key(0), params), []
    for batch in batches():
        state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(seen), named(jax.device_get(state.params))


def plain(name, tx, params):
    """([(loss, gradient norm)], parameters) of optax on one device."""

    def mean(params, batch):
        total, count = model(name).loss(params, batch, None)
        return total / count

    @jax.jit
    def update(params, opt, batch):
        loss, gradient = jax.value_and_grad(mean)(params, batch)
        updates, opt = tx.update(gradient, opt, params)
        return optax.apply_updates(params, updates), opt, loss, optax.tree.norm(gradient)

    seen, opt = [], tx.init(params)
    for batch in batches():
        params, opt, loss, norm = update(params, opt, batch)
        seen.append((float(loss), float(norm)))
    return np.array(seen), named(jax.device_get(params))


def weights_of(params, pattern):
    return jax.tree.map_with_path(lambda path, _: pattern in jax.tree_util.keystr(path), params)


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}}
FEATURES = {
    "clipping": (
        {"gradient_clipping": 0.5},
        lambda params: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    ),
    "AdamW": (ADAMW, lambda params: optax.adamw(1e-2, weight_decay=0.1, eps=1e-3)),
    "frozen": (
        {"frozen_parameters": ["attn/query", "embed"]},
        lambda params: optax.multi_transform(
            {True: optax.set_to_zero(), False: optax.sgd(0.1)},
            jax.tree.map(
                lambda *found: any(found), *(weights_of(params, part) for part in ("query", "embed"))
            ),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("feature", keep([*FEATURES], ["clipping"]))
def test_one_device_computes_the_same(feature):
    config, make = FEATURES[feature]
    params = initial("nnx")
    seen, found = train(make_step(model("nnx"), DIMENSIONS["nnx"], **config), params)
    known, expected = plain("nnx", make(params), params)
    np.testing.assert_allclose(seen[:, 0], known[:, 0], rtol=1e-6)
    if feature != "frozen":  # a norm counts trained leaves alone
        np.testing.assert_allclose(seen[:, 1], known[:, 1], rtol=1e-6)
    assert known[0, 1] > 0.5  # it is clipped
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=2e-6, err_msg=name)


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
    subject = jzero.from_flax(Dropping, lambda net, batch: (net(batch["inputs"]) ** 2).mean())
    table = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0, "embedding": 0}
    found = train(make_step(subject, table), None)
    config = {
        "train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    pair = jzero.make_mesh(zero=2, devices=jax.devices()[:2])
    expected = train(jzero.make_train_step(subject, config, mesh=pair), None)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


@pytest.mark.slow
def test_overflow_in_fp16():
    """From a scale of 2**24 steps are skipped until it fits; then the losses are float32's to fp16's rounding."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    step = make_step(model("nnx"), DIMENSIONS["nnx"], fp16=fp16)
    state, skipped, losses = step.init(jax.random.key(0), initial("nnx")), 0, []
    first, start = batches()[0], named(jax.device_get(initial("nnx")))
    while not losses:
        state, metrics = step(state, first)
        if bool(metrics["skipped"]):
            skipped += 1
            for name, x in named(jax.device_get(state.params)).items():
                np.testing.assert_array_equal(x, start[name], err_msg=name)
        else:
            losses.append(float(metrics["loss"]))
    assert 0 < skipped < 20
    for batch in batches()[1:]:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, reference("nnx")[0][:, 0], rtol=1e-2)
