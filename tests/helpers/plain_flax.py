"""SGD on a Flax module: by jzero at ZeRO stage 3 on four devices, and by plain Flax and optax on one."""

import jax
import numpy as np
import optax
from flax import nnx
from helpers.oracle import plain_loop

import jzero

WIDTH, ROWS, LR = 8, 16, 0.1
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
KEY = jax.random.key(3)


class Normed(nnx.Module):
    """Six features to three, with batch norm."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def mean_square(module, batch):
    return (module(batch) ** 2).mean()


def train(model, steps=3, **more):
    """The losses of `steps` steps of SGD on four devices at ZeRO stage 3, and the parameters at the start."""
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **more,
    }
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(devices=jax.devices()[:4]))
    state = step.init(KEY)
    start, losses = jax.device_get(state.params), []
    for _ in range(steps):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return losses, start


def plain(loss, params, steps=3):
    """The same losses from optax; `loss(params)` is plain Flax."""
    return plain_loop(lambda params, _: loss(params), params, [X] * steps, optax.sgd(LR)).losses


def plain_nnx(build, params, steps=3):
    graph, state, rest = nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params):
        nnx.replace_by_pure_dict(state, params)
        return mean_square(nnx.merge(graph, state, rest), X)

    return plain(loss, params, steps)
