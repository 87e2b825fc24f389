"""Optimizers of the caller's on a layer stack: wrapped by `per_layer` they are optax on the layers, bare ones warn."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import FEATURES, LAYERS, TRAIN, Net, batch

import jzero
from jzero.optimizers import per_layer
from jzero.optimizers.stack_probe import stack_warning

WHICH = {"ends": False, "stack": True}
muon = optax.contrib.muon


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def tuned(params):
    return {"ends": is_matrix(params["ends"]), "stack": jax.tree.map(lambda p: p.ndim > 2, params["stack"])}


def by_key(params):
    return {key: dict.fromkeys(part, key) for key, part in params.items()}


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, weight_decay=0.1))
MASKED = optax.adamw(0.05, weight_decay=2.0, mask=is_matrix)


def begin():
    """Return the model's parameters with biases that weight decay changes."""
    params = Net().init(jax.random.key(0))
    params["stack"]["b"] += jax.random.normal(jax.random.key(1), params["stack"]["b"].shape)
    return params


def train(tx):
    """Three steps of ZeRO-3 on four devices: the losses, and the run report."""
    config = {
        "train_batch_size": TRAIN,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0,
    }
    step = jzero.make_train_step(Net(), config, optimizer=tx, mesh=jzero.make_mesh(devices=jax.devices()[:4]))
    state, losses = step.init(jax.random.key(0), begin()), []
    for seed in range(3):
        state, metrics = step(state, batch(seed))
        losses.append(float(metrics["loss"]))
    return losses, jzero.report(step)


def train_layers(tx):
    """The same in plain JAX: each layer's parameters are leaves of their own."""
    params = begin()
    layers = [jax.tree.map(lambda x: x[k], params["stack"]) for k in range(LAYERS)]  # noqa: B023
    params = {"ends": params["ends"], "layers": layers}

    def loss(params, batch):
        x = batch["x"] @ params["ends"]["first"]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return ((x @ params["ends"]["last"] - batch["y"]) ** 2).mean()

    @jax.jit
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for seed in range(3):
        params, state, value = step(params, state, batch(seed))
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("tx", [MASKED, muon(0.05), optax.lamb(0.05)], ids=["mask", "muon", "lamb"])
def test_per_layer_is_optax_on_the_layers(tx):
    expected = train_layers(tx)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses, _ = train(per_layer(tx, WHICH))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    with pytest.warns(UserWarning, match="per_layer"):
        bare, text = train(tx)
    assert max(abs(np.array(bare) - expected)) > 1e-3 * max(expected)
    warned = text.split("Warnings")[1].split("Layout")[0]
    assert "stack/b" in warned
    assert "per_layer(tx" in warned


def test_what_treats_all_layers_alike_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses, text = train(CLIPPED)
    np.testing.assert_allclose(losses, train_layers(CLIPPED), rtol=2e-5)
    assert "per_layer" not in text


SHAPES = {
    "ends": {"out": jax.ShapeDtypeStruct((FEATURES, 1000), jnp.float32)},
    "stack": {
        "kernel": jax.ShapeDtypeStruct((LAYERS, FEATURES, FEATURES), jnp.float32),
        "bias": jax.ShapeDtypeStruct((LAYERS, FEATURES), jnp.float32),
    },
}


@pytest.mark.parametrize(
    ("tx", "leaves"),
    [
        (optax.adamw(0.01, weight_decay=1e-4, mask=is_matrix), "stack/bias"),
        (optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(1.0)), "stack/bias, stack/kernel"),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.clip_by_global_norm(1.0)), "stack/bias, stack/kernel"),
        (optax.adafactor(0.01), "stack/bias, stack/kernel"),
        (optax.sm3(0.01), "stack/bias, stack/kernel"),
        (optax.partition({"stack": optax.lars(0.1), "ends": optax.sgd(0.1)}, by_key), "stack/bias, stack/kernel"),
        (optax.adamw(0.01, mask=tuned), None),
        (optax.partition({"stack": optax.adam(0.01), "ends": optax.sgd(0.1)}, by_key), None),
        (optax.chain(optax.clip_by_global_norm(1.0), per_layer(optax.lars(0.1), WHICH)), None),
        (optax.adamw(0.01, mask={"ends": {"out": True}, "stack": {"kernel": True, "bias": False}}), None),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1.0)), None),
        (optax.inject_hyperparams(optax.lion)(learning_rate=0.01), None),
    ],
)
def test_which_optimizers_warn(tx, leaves):
    text = stack_warning(tx, SHAPES)
    assert text.startswith(f"the optimizer passed in does not update {leaves} layer") if leaves else not text
