"""An engine with a stack, noise and weighted losses, and its data."""

from functools import lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from helpers.steps import mesh

import jzero
from jzero.model import stack_loss

FEATURES, MICRO, ACCUM, REPLICAS = 8, 2, 3, 4
UNIT = MICRO * REPLICAS  # rows of a micro-batch of all replicas
TRAIN = UNIT * ACCUM


class Net:
    """Two layers in a stack, with noise from the key; a `Mean`, so that every micro-batch weighs differently."""

    def init(self, rng):
        w, v = (0.3 * jax.random.normal(key, (2, FEATURES, FEATURES)) for key in jax.random.split(rng))
        return {"ends": {"out": v[0]}, "stack": {"w": w}}

    def prefix(self, ends, batch, rng):
        return batch["x"]

    def block(self, layer, x, rng):
        noise = 1.0 if rng is None else jax.random.uniform(rng, x.shape, x.dtype, 0.5, 1.5)
        return x + jnp.tanh(x @ layer["w"]) * noise

    def suffix(self, ends, x, batch, rng):
        error = ((x @ ends["out"] - batch["y"]) ** 2).mean(-1)
        return jzero.Mean(jnp.sum(error * batch["mask"]), batch["mask"].sum())

    loss = stack_loss


# A model that compiles fast, whose loss has no count: its mean over micro-batches is the plain mean.
LINE = SimpleNamespace(
    init=lambda rng: {"w": jax.random.normal(rng, (FEATURES,))},
    loss=lambda params, batch, rng: jnp.mean((batch["x"] @ params["w"] - batch["y"][:, 0]) ** 2),
)


def rows(seed, n=TRAIN):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    mask = (rng.random(n) < 0.6).astype(np.float32)
    mask[::UNIT] = 1
    return {"x": x, "y": np.roll(x, 1, axis=1), "mask": mask}


def parts(seed, n=ACCUM):
    return [rows(100 * seed + i, UNIT) for i in range(n)]


def config(stage=2, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUM,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "stack": {"unroll": False},
        **more,
    }


@lru_cache
def compiled(stage):
    step = jzero.make_train_step(Net(), config(stage), mesh=mesh())
    return step, step.init(jax.random.key(0))


def engine(stage=2):
    step, state = compiled(stage)
    made = jzero.Engine(step, jax.random.key(0))
    made.state = jax.tree.map(jnp.copy, state)
    return made


def build(stage=2, *, zero=REPLICAS, data=1, model=None, more=None, **arguments):
    return jzero.initialize(
        model=model or Net(), config=config(stage, **(more or {})), mesh=mesh(zero, data=data), **arguments
    )


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True):
        np.testing.assert_array_equal(x, y)


def three_calls(engine, micro_batches):
    losses = []
    for micro_batch in micro_batches:
        losses.append(engine(micro_batch))
        engine.backward(losses[-1])
        engine.step()
    return losses


def parts_of(batch):
    return [jax.tree.map(lambda x, i=i: x[i * UNIT : (i + 1) * UNIT], batch) for i in range(ACCUM)]


def printed(engine, capsys):
    """Return what was printed so far, with the lines of the steps that the devices have finished."""
    engine._observers.waiter.settle()
    return capsys.readouterr().out
