"""A network of layers in which tests plant what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import engines
from helpers.oracle import stacked_loss

LAYERS, WIDTH = 4, 8


class Net:
    """Four layers. One whose gain is 1 overflows in a row that begins with 200; `root` has no gradient at 0."""

    def init(self, rng):
        w = 0.3 * jax.random.normal(rng, (LAYERS, WIDTH, WIDTH))
        return {"ends": {"out": w[0]}, "stack": {"w": w, "gain": jnp.zeros(LAYERS), "root": jnp.zeros(LAYERS)}}

    def prefix(self, ends, batch, rng):
        return batch["x"]

    def block(self, layer, x, rng):
        x = x * jnp.exp(layer["gain"] * x[:, :1])
        return x + jnp.tanh(x @ layer["w"]) + layer["root"] * jnp.sqrt(jnp.maximum(x[:, -1:], 1 - layer["root"]))

    def suffix(self, ends, x, batch, rng):
        return ((x @ ends["out"] - batch["y"]) ** 2).mean()

    loss = stacked_loss


def config(stage, **more):
    return engines.config(stage, **{"stack": {}, "non_finite": {"action": "stop", "output_path": "saved"}, **more})


def rows(seed, n):
    x = np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)
    return {"x": np.clip(x, -1, 1), "y": np.roll(x, 1, axis=1)}


def put(x, index, value):
    x[index] = value
    return x


def train(engine, *batches):
    for batch in batches:
        engine.train_batch(batch)
