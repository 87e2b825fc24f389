"""The rows of a micro-batch, seen by a loss that couples them: BatchNorm's statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero

ROWS, ACCUM, WIDTH, STEPS = 32, 2, 6, 2
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
DATA = {"x": X * np.arange(1, ROWS + 1)[:, None] / 8, "y": X[:, :1]}
MICRO = ROWS // ACCUM


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


def mse(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def expected(micro_batches):
    """The losses of plain JAX, with SGD, over these lists of rows."""
    out = Normed(nnx.Rngs(0)).out
    params = {"w": out.kernel[...], "b": out.bias[...], "scale": jnp.ones(WIDTH), "shift": jnp.zeros(WIDTH)}

    def loss(params):
        losses = []
        for rows in micro_batches:
            x = DATA["x"][rows]
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * params["scale"] + params["shift"]
            losses.append(jnp.mean((x @ params["w"] + params["b"] - DATA["y"][rows]) ** 2))
        return sum(losses) / len(losses)

    losses = []
    for _ in range(STEPS):
        value, gradients = jax.value_and_grad(loss)(params)
        losses.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return losses


IN_ORDER = list(np.arange(ROWS).reshape(ACCUM, MICRO))
CONFIG = {"train_batch_size": ROWS, "gradient_accumulation_steps": ACCUM, "gradient_clipping": 0}


def engine_on(devices, data=None):
    """An engine on that many devices."""
    return jzero.initialize(
        model=jzero.from_flax(Normed(nnx.Rngs(0)), mse), config=CONFIG, optimizer=optax.sgd(0.1), training_data=data,
        mesh=jzero.make_mesh(devices=jax.devices()[:devices]),
    )[0]  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_an_iterator_gives_the_same_micro_batches_on_every_mesh(devices):
    parts, engine = [{name: x[rows] for name, x in DATA.items()} for rows in IN_ORDER], engine_on(devices)
    losses = [float(engine.train_batch(iter(parts))) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, expected(IN_ORDER), rtol=1e-5)


def test_training_data_give_the_same_micro_batches_on_every_mesh():
    engines = [engine_on(devices, DATA) for devices in (1, 2, 4)]
    one, *others = [[float(engine.train_batch()) for _ in range(STEPS)] for engine in engines]
    for losses in others:
        np.testing.assert_allclose(losses, one, rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_each_device_cuts_its_rows_of_a_global_batch(devices):
    """Micro-batch k is the k-th part of every device's block, in the engine and the functional API."""
    blocks = np.arange(ROWS).reshape(devices, ACCUM, -1)
    wanted = expected([blocks[:, k].ravel() for k in range(ACCUM)])
    engine = engine_on(devices)
    np.testing.assert_allclose([float(engine.train_batch(DATA)) for _ in range(STEPS)], wanted, rtol=1e-5)
    step = engine.step_fn
    state, losses = step.init(jax.random.key(0)), []
    for _ in range(STEPS):
        state, metrics = step(state, DATA)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    if devices > 1:
        assert abs(wanted[1] - expected(IN_ORDER)[1]) > 1e-4
