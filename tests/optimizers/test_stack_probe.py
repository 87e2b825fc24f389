"""Optimizers of the caller's on a layer stack: wrapped by `per_layer` they are optax on the layers, bare ones warn."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.oracle import plain_loop
from helpers.oracle import train as train_step
from helpers.steps import mesh, settings
from layouts import FEATURES, LAYERS, TRAIN, Net, batch

import jzero
from jzero.optimizers import per_layer
from jzero.optimizers.stack_probe import stack_warning

WHICH = {"ends": False, "stack": True}
BATCHES = [batch(seed) for seed in range(3)]


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def tuned(params):
    return {"ends": is_matrix(params["ends"]), "stack": jax.tree.map(lambda p: p.ndim > 2, params["stack"])}


def by_key(params):
    return {key: dict.fromkeys(part, key) for key, part in params.items()}


MASKED = optax.adamw(0.05, weight_decay=2.0, mask=is_matrix)


def begin():
    """Return the model's parameters with biases that weight decay changes."""
    params = Net().init(jax.random.key(0))
    params["stack"]["b"] += jax.random.normal(jax.random.key(1), params["stack"]["b"].shape)
    return params


def train(tx):
    """Three steps of ZeRO-3 on four devices: the losses, and the run report."""
    config = {key: x for key, x in settings(TRAIN, 3).items() if key != "optimizer"}
    step = jzero.make_train_step(Net(), config, optimizer=tx, mesh=mesh())
    return train_step(step, begin(), BATCHES)[0][:, 0], jzero.report(step)


def train_layers(tx):
    """The same in plain JAX: each layer's parameters are leaves of their own."""

    def loss(params, batch):
        x = batch["x"] @ params["ends"]["first"]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return ((x @ params["ends"]["last"] - batch["y"]) ** 2).mean()

    params = begin()
    layers = [jax.tree.map(lambda x, k=k: x[k], params["stack"]) for k in range(LAYERS)]
    return plain_loop(loss, {"ends": params["ends"], "layers": layers}, BATCHES, tx).losses


def test_per_layer_is_optax_on_the_layers():
    expected = train_layers(MASKED)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses, _ = train(per_layer(MASKED, WHICH))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    with pytest.warns(UserWarning, match="per_layer"):
        bare, text = train(MASKED)
    assert max(abs(bare - expected)) > 1e-3 * max(expected)
    warned = text.split("Warnings")[1].split("Layout")[0]
    assert "stack/b" in warned
    assert "per_layer(tx" in warned


SHAPES = {
    "ends": {"out": jax.ShapeDtypeStruct((FEATURES, 1000), jnp.float32)},
    "stack": {
        "kernel": jax.ShapeDtypeStruct((LAYERS, FEATURES, FEATURES), jnp.float32),
        "bias": jax.ShapeDtypeStruct((LAYERS, FEATURES), jnp.float32),
    },
}
BOTH = "stack/bias, stack/kernel"


@pytest.mark.parametrize(
    ("tx", "leaves"),
    [
        (optax.adamw(0.01, weight_decay=1e-4, mask=is_matrix), "stack/bias"),
        (optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(1.0)), BOTH),
        (optax.lamb(0.05), BOTH),
        (optax.partition({"stack": optax.lars(0.1), "ends": optax.sgd(0.1)}, by_key), BOTH),
        (optax.adamw(0.01, mask=tuned), None),
        (optax.partition({"stack": optax.adam(0.01), "ends": optax.sgd(0.1)}, by_key), None),
        (optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1)), None),
        (optax.chain(optax.clip_by_global_norm(1.0), per_layer(optax.lars(0.1), WHICH)), None),
        (optax.adamw(0.01, mask={"ends": {"out": True}, "stack": {"kernel": True, "bias": False}}), None),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1.0)), None),
    ],
)
def test_which_optimizers_warn(tx, leaves):
    text = stack_warning(tx, SHAPES)
    assert text.startswith(f"the optimizer passed in does not update {leaves} layer") if leaves else not text
