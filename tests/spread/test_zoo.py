"""No primitive of the models here runs on whole arrays where `tensor` divides their parameters.

An upgrade of JAX may bring primitives without a rule; results stay right, but each would cost an all-gather. Models are
traced with their gradients, not compiled.
"""

import dataclasses
from collections import Counter
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.sampling import keep
from helpers.tensor_models import BATCH, DIMENSIONS, PACKED, SEQUENCE, WIDTH, batches, make_step, model

import jzero
from jzero.model import STACK
from jzero.planner.traced_operations import moves
from models.llama import Llama
from models.moe import MixtureConfig

TENSOR, LAYERS = 2, 2
FLOAT = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


@lru_cache
def of_step(name):
    """What a train step moves, and runs on whole arrays."""
    kind = name.removesuffix(", packed")
    if kind in OWN:
        make, batch, table = OWN[kind]
        subject = make()
    else:
        subject, batch, table = model(kind), batches(kind)[0], DIMENSIONS[kind]
    if name in ("llama", "mixture"):
        batch = {key: batch[key] for key in ("inputs", "labels")}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    step = make_step(subject, tensor=TENSOR, dimensions=table, unroll=False)
    return moves(step.trace(shapes), step.mesh)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(self.drop(nnx.gelu(self.up(x)))))


class UNet(nnx.Module):
    """Down, middle with attention, up; with group and batch norms, pools, and the time of the noise."""

    def __init__(self, rngs):
        conv = partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        self.start, self.first, self.down = conv(4, 16), conv(16, 16), conv(16, 32, strides=2)
        self.norm, self.time = nnx.GroupNorm(32, 4, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.depthwise = conv(32, 32, feature_group_count=32)
        self.up = nnx.ConvTranspose(32, 16, (2, 2), strides=(2, 2), rngs=rngs)
        self.join, self.end = conv(32, 16), conv(16, 4)
        self.drop, self.statistics = nnx.Dropout(0.1, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x, t):
        frequencies = jnp.exp(-jnp.arange(8) / 8)
        angles = t[:, None] * frequencies
        time = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        a = nnx.silu(self.statistics(self.first(self.start(x))))
        b = nnx.silu(self.norm(self.down(a))) + time[:, None, None]
        rows, height, width, channels = b.shape
        b = b + self.attention(b.reshape(rows, height * width, channels)).reshape(b.shape)
        b = self.drop(nnx.silu(self.depthwise(b)))
        c = jnp.concatenate([self.up(b), jax.image.resize(b, (*a.shape[:3], 32), "nearest")[..., :16]], -1)
        c = self.join(c)
        c = nnx.avg_pool(c, (2, 2), (2, 2)) + nnx.max_pool(c, (3, 3), (2, 2), "SAME")
        c = jax.image.resize(c, a.shape, "bilinear")
        return self.end(nnx.relu(c))


def denoising(module, batch):
    images, noise, t = batch["images"], batch["noise"], batch["t"]
    noisy = jnp.sqrt(1 - t)[:, None, None, None] * images + jnp.sqrt(t)[:, None, None, None] * noise
    return ((module(noisy, t) - noise) ** 2).mean()


def mixture():
    config = dataclasses.replace(
        PACKED, mixture=MixtureConfig(4, 2, 16, shared=16, capacity_factor=1.0, bias_rate=0.01)
    )
    return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))


OWN = {  # name: (model, batch, table)
    "mixture": (mixture, batches("mixture")[0], {}),
    "dropout": (
        lambda: jzero.from_flax(Dropping, lambda module, batch: (module(batch["x"]) ** 2).mean()),
        {"x": FLOAT((BATCH, SEQUENCE, 32))},
        {"up/kernel": 1, "up/bias": 0, "down/kernel": 0},
    ),
    "unet": (
        lambda: jzero.from_flax(UNet, denoising),
        {"images": FLOAT((BATCH, 16, 16, 4)), "noise": FLOAT((BATCH, 16, 16, 4)), "t": FLOAT((BATCH,))},
        {
            "(start|first|down|depthwise)/kernel": 3, "time/kernel": 1, "(start|first|down|time|depthwise)/bias": 0,
            "(query|key|value)/kernel": 1, "(query|key|value)/bias": 0, "out/kernel": 0, "norm": 0,
            "up/kernel": 3, "up/bias": 0, "join/kernel": 2, "end/kernel": 2,
        },
    ),
    "odd": (lambda: model("bert"), {key: x[:, 1:] for key, x in batches("bert")[0].items()}, DIMENSIONS["bert"]),
}  # fmt: skip
IN_A_STEP = ["llama, packed", "mixture", "bert", "nnx", "linen", "dropout", "layers", "unet"]


@pytest.mark.parametrize("name", keep(IN_A_STEP, ["llama, packed", "mixture", "dropout", "layers", "unet"]))
def test_a_train_step(name):
    assert of_step(name).whole == ()


PAIR = ("all-gather", "reduce-scatter")
MEGATRONS = [
    ("gpt2", SEQUENCE, PAIR),
    ("llama", SEQUENCE, PAIR),
    ("vit", 18, PAIR),
    ("odd", SEQUENCE - 1, ("all-reduce",)),  # such a sequence is whole on each device
]


@pytest.mark.parametrize(("name", "length", "kinds"), keep(MEGATRONS, [MEGATRONS[0], MEGATRONS[-1]]))
def test_a_layer_of_fused_weights_moves_as_megatrons(name, length, kinds):
    """Two collectives of an activation of each kind a layer forward, and as many backward; nothing else."""
    found, step = Counter(), of_step(name)
    for move in step.all:
        if move.scope.startswith(STACK):
            found[move.part, move.kind, move.bytes] += move.times
    size = BATCH * length * WIDTH * 4
    assert found == {(part, kind, size): 2 * LAYERS for part in ("forward", "backward") for kind in kinds}
    assert step.whole == ()
