"""A network of layers in four layouts in which tests plant what is not finite."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.drawn import random_params
from helpers.oracle import stacked_loss
from helpers.reference import assert_bitwise

import jzero
from jzero.loss_scale import NonFiniteError

LAYERS, WIDTH, MICRO, ACCUM = 4, 8, 2, 3


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


GROUPS = "stage 3 in groups"  # parts on some devices, copies on others: the layout of the default run
LAYOUTS = {  # stage, pipe, data, zero, whether the layers are unrolled
    "stage 0": (0, 1, 4, 1, True),
    "stage 3": (3, 1, 1, 4, True),
    GROUPS: (3, 1, 2, 2, False),
    "pipeline": (1, 2, 1, 2, False),
}


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUM,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "non_finite": {"action": "stop", "output_path": "saved"},
        **more,
    }


@lru_cache
def step_of(layout):
    stage, pipe, data, zero, unroll = LAYOUTS[layout]
    mesh = jzero.make_mesh(pipe=pipe, data=data, zero=zero, devices=jax.devices()[: pipe * data * zero])
    return jzero.make_train_step(Net(), config(stage, stack={"unroll": unroll}), mesh=mesh)


def new_params():
    """The parameters of a new network; to draw them with JAX takes longer to compile than a step."""
    params = random_params(Net())
    return params | {"stack": params["stack"] | {name: np.zeros(LAYERS, np.float32) for name in ("gain", "root")}}


def engine_of(layout):
    return jzero.Engine(step_of(layout), jax.random.key(0), params=new_params())


def rows(seed, n):
    x = np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)
    return {"x": np.clip(x, -1, 1), "y": np.roll(x, 1, axis=1)}


def replicas_of(layout):
    return LAYOUTS[layout][2] * LAYOUTS[layout][3]


def batch_of(layout, seed=0):
    return rows(seed, MICRO * ACCUM * replicas_of(layout))


def change(engine, leaf, f):
    """Replace a stacked parameter by f of it, in its own sharding."""
    stack, old = engine.state.params["stack"], engine.state.params["stack"][leaf]
    stack[leaf] = jax.device_put(f(np.array(old)), old.sharding)


def put(x, index, value):
    x[index] = value
    return x


def train(engine, *batches):
    for batch in batches:
        engine.train_batch(batch)


def found_by(engine, bad, good, plant):
    """Train on a good batch, plant a fault, train on the bad batch and a good one; return what the error says."""
    engine.train_batch(good)
    change(engine, *plant)
    before = jax.device_get((engine.state.params, engine.state.opt_state))
    engine.train_batch(bad)
    with pytest.raises(NonFiniteError) as error:
        engine.train_batch(good)
    assert_bitwise(before, (engine.state.params, engine.state.opt_state))
    assert engine.global_steps == int(engine.state.step) == 1
    return str(error.value)
