"""Small Flax modules and their losses, and plain Flax on one device."""

import jax
import numpy as np
import optax
from flax import nnx

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


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mean_square(module, batch):
    return (module(batch) ** 2).mean()


def train_module(module, loss, batches):
    """The losses of plain Flax, which moves a module's state too; the module changes."""
    gradient_of, losses = nnx.jit(nnx.value_and_grad(loss)), []
    for batch in batches:
        value, gradient = gradient_of(module, batch)
        nnx.update(module, jax.tree.map(lambda w, g: w - LR * g, nnx.state(module, nnx.Param), gradient))
        losses.append(float(value))
    return losses


def nnx_loss(build, loss):
    """The loss of a module by Flax alone, as a function of a dict of its parameters."""

    def of(params, batch, extra):
        graph, state, rest = nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)
        nnx.replace_by_pure_dict(state, params)
        return loss(nnx.merge(graph, state, rest), batch)

    return of
