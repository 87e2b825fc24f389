"""SGD on a Flax module: by jzero at ZeRO stage 3 on four devices, and by plain Flax and optax on one."""

import jax
import numpy as np
import optax
from flax import nnx
from helpers.oracle import plain_loop
from helpers.steps import mesh, run, settings

import jzero

WIDTH, ROWS, LR = 8, 16, 0.1
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
KEY = jax.random.key(3)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def mean_square(module, batch):
    return (module(batch) ** 2).mean()


def train(model, steps=3):
    """The losses of `steps` steps of SGD on four devices at ZeRO stage 3, and the parameters at the start."""
    start, losses, _ = run(jzero.make_train_step(model, settings(ROWS, 3, lr=LR), mesh=mesh()), [X] * steps)
    return losses, start


def plain(loss, params, steps=3):
    return plain_loop(lambda params, _: loss(params), params, [X] * steps, optax.sgd(LR)).losses


def plain_nnx(build, params, steps=3):
    graph, state, rest = nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params):
        nnx.replace_by_pure_dict(state, params)
        return mean_square(nnx.merge(graph, state, rest), X)

    return plain(loss, params, steps)
