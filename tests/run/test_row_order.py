"""The rows of a micro-batch, seen by a loss that couples them: BatchNorm's statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero

ROWS, ACCUM, WIDTH, STEPS = 32, 2, 6, 2
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
DATA = {"x": X * np.arange(1, ROWS + 1)[:, None] / 8, "y": X[:, :1]}
CONFIG = {"train_batch_size": ROWS, "gradient_accumulation_steps": ACCUM, "gradient_clipping": 0}


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


def losses():
    """The losses on 1 and 4 devices, from the same parameters, by the way in which the rows come."""
    parts = [{name: x[rows] for name, x in DATA.items()} for rows in np.arange(ROWS).reshape(ACCUM, -1)]
    ways, found = {"iterator": lambda: iter(parts), "global batch": lambda: DATA, "data": lambda: None}, {}
    for devices in (1, 4):
        engine = jzero.initialize(
            model=jzero.from_flax(Normed(nnx.Rngs(0)), mse), config=CONFIG, optimizer=optax.sgd(0.1),
            training_data=DATA, mesh=jzero.make_mesh(devices=jax.devices()[:devices]),
        )[0]  # fmt: skip
        first = engine.state
        for way, batch in ways.items():
            engine.state = jax.tree.map(jnp.copy, first)
            found[way, devices] = [float(engine.train_batch(batch())) for _ in range(STEPS)]
    return found


def test_the_rows_of_a_micro_batch():
    """An iterator's and training_data's are the same on every mesh; each device cuts its rows of a global batch."""
    found, whole, blocks = losses(), np.arange(ROWS).reshape(ACCUM, -1), np.arange(ROWS).reshape(4, ACCUM, -1)
    wanted = expected(whole)
    np.testing.assert_allclose([found["iterator", devices] for devices in (1, 4)], [wanted, wanted], rtol=1e-5)
    np.testing.assert_allclose(found["data", 4], found["data", 1], rtol=1e-5)
    # Micro-batch k is the k-th part of every device's block.
    wanted = expected([blocks[:, k].ravel() for k in range(ACCUM)])
    np.testing.assert_allclose(found["global batch", 4], wanted, rtol=1e-5)
    assert abs(wanted[1] - found["iterator", 4][1]) > 1e-4
