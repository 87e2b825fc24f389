"""A small model in many layouts, for the tests of checkpoints, in one process or in many."""

import jax
import jax.numpy as jnp
import numpy as np

import jzero
from jzero.model import stack_loss

jax.config.update("jax_disable_most_optimizations", True)  # as conftest.py does, for the processes that import this
FEATURES, LAYERS, TRAIN = 8, 4, 32

# name: stage, mesh, micro-batch, pipeline; the global batch is the same for all
LAYOUTS = {
    "one": (0, {}, 8, {}),
    "stage0": (0, {"data": 8}, 4, {}),
    "stage1": (1, {"data": 2, "zero": 4}, 2, {}),
    "stage2": (2, {"zero": 8}, 4, {}),
    "stage3": (3, {"zero": 8}, 2, {}),
    "hsdp": (3, {"data": 4, "zero": 2}, 1, {}),
    "1f1b": (0, {"pipe": 4}, 8, {}),
    "gpipe": (1, {"pipe": 2, "zero": 2}, 4, {"schedule": "gpipe"}),
    "interleaved": (2, {"pipe": 2, "zero": 4}, 2, {"schedule": "interleaved", "chunks": 2}),
    "zero_bubble": (3, {"pipe": 2, "data": 2, "zero": 2}, 2, {"schedule": "zero_bubble"}),
}
# two processes with two devices each
SHARED = {
    "stage0 x 2": (0, {"data": 4}, 4, {}),
    "stage1 x 2": (1, {"zero": 4}, 8, {}),
    "stage2 x 2": (2, {"data": 2, "zero": 2}, 4, {}),
    "stage3 x 2": (3, {"zero": 4}, 4, {}),
    "pipe x 2": (3, {"pipe": 2, "zero": 2}, 4, {"schedule": "interleaved", "chunks": 2}),
}


class Net:
    """Layers in a stack and two ends; `noise` is drawn from the step's key."""

    def __init__(self, noise=False):
        self.noise = noise

    def init(self, rng):
        first, stack, last = jax.random.split(rng, 3)
        square = FEATURES, FEATURES
        ends = {"first": jax.random.normal(first, square), "last": jax.random.normal(last, square)}
        layers = jax.random.normal(stack, (LAYERS, *square)), jnp.zeros((LAYERS, FEATURES))
        return jax.tree.map(lambda x: 0.3 * x, {"ends": ends, "stack": dict(zip("wb", layers, strict=True))})

    def prefix(self, ends, batch, rng):
        return batch["x"].astype(ends["first"].dtype) @ ends["first"]

    def block(self, layer, x, rng):
        noise = jax.random.uniform(rng, x.shape, x.dtype, 0.5, 1.5) if self.noise and rng is not None else 1
        return x + jnp.tanh(x @ layer["w"] + layer["b"]) * noise

    def suffix(self, ends, x, batch, rng):
        return ((x @ ends["last"] - batch["y"]).astype(jnp.float32) ** 2).mean()

    loss = stack_loss


def data(samples=100, seed=0):
    x = np.random.default_rng(seed).normal(size=(samples, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def batch(seed):
    return data(TRAIN, seed)


def settings(layout, **more):
    stage, mesh, micro, pipeline = layout
    return {
        "train_batch_size": TRAIN,
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"zero": 1, **mesh},
        "pipeline": pipeline,
        "stack": {"unroll": "auto" if "pipe" in mesh else False},
        **more,
    }


def make_mesh(layout):
    jzero.init_distributed()
    degrees = {"zero": 1, **layout[1]}
    return jzero.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])


def build(layout, *, noise=False, model=None, training_data=None, resume=None, rng=None, **more):
    return jzero.initialize(
        model=model or Net(noise), config=settings(layout, **more), mesh=make_mesh(layout), training_data=training_data,
        resume=resume, rng=jax.random.key(0) if rng is None else rng,
    )[0]  # fmt: skip


def assert_same(a, b):
    """Two states, bit for bit."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(jax.device_get(one), jax.device_get(other))
