"""A small Llama in many layouts, for the tests of weights."""

import json
from functools import cache

import jax
import numpy as np
from helpers.drawn import drawn
from helpers.named_models import model_of
from helpers.steps import mesh, settings

import jzero
from jzero.model import stack_loss
from models.llama import LlamaConfig

GROUPED = LlamaConfig(4, 32, 4, 2, 48, vocab_size=64, rope_theta=1234.0)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16))


class Net:
    """A model without a table, with a stack."""

    def init(self, rng):
        w, v = (0.3 * jax.random.normal(key, (2, 8, 8)) for key in jax.random.split(rng))
        return {"ends": {"out": v[0], "scale": v[0, 0, 0]}, "stack": {"w": w}}

    def prefix(self, ends, batch, rng):
        return batch

    def block(self, layer, x, rng):
        return x + x @ layer["w"]

    def suffix(self, ends, x, batch, rng):
        return ((x @ ends["out"] * ends["scale"]) ** 2).mean()

    loss = stack_loss


class One:
    def init(self, rng):
        return jax.random.normal(rng, (8, 8))

    def loss(self, params, batch, rng):
        return ((batch @ params) ** 2).mean()


@cache
def model(shape=GROUPED):
    return model_of(shape)


def step(made=None, stage=0, *, more=None, **axes):
    """A train step on a mesh with these axes; default: one device. Tests share those of Llamas."""
    return _step(made or model(), stage, json.dumps(more or {}), tuple(sorted(axes.items())))


@cache
def _step(made, stage, more, axes):
    axes = {"zero": 1, **dict(axes)}
    own = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    config = settings(None, stage, axes.get("pipe", 1)) | own | json.loads(more)
    return jzero.make_train_step(made, config, mesh=mesh(**axes))


def engine(*arguments, seed=0, **keywords):
    made = step(*arguments, **keywords)
    return jzero.Engine(made, jax.random.key(seed), params=drawn(made.state_shapes.params, scale=0.2, seed=seed))


def logits(made, params):
    return np.asarray(jax.jit(lambda params: made.module(params)(TOKENS))(jax.device_get(params)))


def same(a, b):
    def plain(x):
        return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.all(jax.tree.map(lambda x, y: bool((plain(x) == plain(y)).all()), a, b))
