"""The table found by trying moves no more than one by hand; no primitive of the models runs on whole arrays."""

import re
import time
from collections import Counter
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.named_models import model_of
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.tensor_models import BATCH, DIMENSIONS, GPT, SEQUENCE, WIDTH, batches, make_step, model

import jzero
from jzero.model import STACK
from jzero.planner.traced_operations import moves
from models.llama import preset
from models.moe import MixtureConfig

MEGATRON = {
    "stack/attention/qkv/kernel": 1, "stack/attention/out/kernel": 0, "stack/mlp/gate_up/kernel": 2,
    "stack/mlp/down/kernel": 0, "ends/head/kernel": 1,
}  # fmt: skip


def dims_of(table, names):
    return {name: next((d for pattern, d in table.items() if re.search(pattern, name)), None) for name in names}


def test_megatrons_table_for_a_large_llama_in_seconds():
    """Llama-70B by its shapes: only one of its 80 layers is tried, and nothing is computed."""
    config = preset("8b", d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, d_ff=28672, attention="xla")
    tokens = jax.ShapeDtypeStruct((1, 4096), np.int32)
    start = time.process_time()
    found = jzero.find_dimensions(model_of(config), {"inputs": tokens, "labels": tokens}, 8)
    assert time.process_time() - start < 60
    assert dims_of(found, MEGATRON) == MEGATRON
    assert not any("norm" in pattern for pattern in found)


@pytest.mark.slow
def test_a_step_without_a_table_finds_one():
    examples = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batches()[0].items()}
    untold = jzero.from_flax(GPT, example_batch=examples)
    step = make_step(untold, tensor=2, zero=2, stage=3, more={"tensor_parallel": {"autotp_size": 2}})
    found = step.config.tensor_parallel.dimensions
    assert dims_of(found, ["stack/up/kernel", "stack/down/kernel"]) == {"stack/up/kernel": 1, "stack/down/kernel": 0}
    assert 'tensor_parallel.dimensions, found by trying: {"^ends/' in re.sub(r"\s+", " ", jzero.report(step))


class Adapter(nnx.Module):
    """An adapter of rank 1 beside a kernel. Divided, `a` would cost a sum; `b` is divided for nothing."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.zeros((1024, 1024)))
        self.a, self.b = nnx.Param(jnp.zeros((1024, 1))), nnx.Param(jnp.zeros((1, 1024)))

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel[...]) + x @ self.a[...] @ self.b[...]


class Listed(nnx.Module):
    """Four layers have one entry; the last one, of another shape, has its own."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.last = nnx.Linear(8, 6, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.last(x)


class Gated:
    """A bias and state of one shape; the new state is no function of the old, so that nothing is moved for it."""

    state = ("gate",)

    def init(self, rng):
        return {"bias": jnp.ones(16), "down": jnp.ones((16, 8)), "gate": jnp.ones(16), "up": jnp.ones((8, 16))}

    def loss(self, params, batch, rng):
        hidden = (batch @ params["up"] + params["bias"]) * params["gate"]
        return (hidden @ params["down"]).mean(), {"gate": jnp.zeros(16)}


class Sampling(linen.Module):
    """Draws whenever it is called, as the decoder of Flax's seq2seq example does."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(16)(x)
        return linen.Dense(8)(x + jax.random.normal(self.make_rng("noise"), x.shape))


SQUARE = linen.Sequential([linen.Dense(8, use_bias=False), jnp.tanh, linen.Dense(8, use_bias=False)])


def find(net, *shape):
    batch = jax.ShapeDtypeStruct(shape, jnp.float32)
    if not hasattr(net, "loss"):
        net = jzero.from_flax(net, lambda net, x: (net(x) ** 2).mean(), example_batch=batch)
    return jzero.find_dimensions(net, batch, 2)


@pytest.mark.parametrize(
    ("net", "shape", "table"),
    [
        (Adapter, (4, 8, 1024), {"^b$": 1, "^kernel$": 1}),
        (Listed, (4, 6, 8), {"^last/kernel$": 0, r"^layers/\d+/bias$": 0, r"^layers/\d+/kernel$": 1}),
        (Gated(), (4, 8), {"^bias$": 0, "^down$": 0, "^up$": 1}),
        (SQUARE, (4, 8), {r"^layers_\d+/kernel$": 1}),  # all-gathers: an all-reduce would move as much twice
        (Sampling(), (4, 6, 8), {r"^Dense_\d+/bias$": 0, "^Dense_0/kernel$": 1, "^Dense_1/kernel$": 0}),
    ],
)
def test_the_table(net, shape, table):
    assert find(net, *shape) == table


def test_nothing_to_divide():
    words = "tensor = 2 divides no dimension of a parameter"
    refuses(lambda: find(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 4, 3), words)


# ---------------------------------------------------------------------- what a step runs on whole arrays


TENSOR, LAYERS = 2, 2
FLOAT = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


@lru_cache
def of_step(name):
    kind = name.removesuffix(", packed")
    if kind in OWN:
        make, batch, table = OWN[kind]
        subject = make()
    else:
        subject, batch, table = model(kind), batches(kind)[0], DIMENSIONS[kind]
    if name == "llama":
        batch = {key: batch[key] for key in ("inputs", "labels")}
    step = make_step(subject, tensor=TENSOR, dimensions=table, unroll=False)
    return moves(step.trace(batch), step.mesh)


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


EXPERTS = MixtureConfig(4, 2, 16, shared=16, capacity_factor=1.0, bias_rate=0.01)
OWN = {  # name: (model, batch, table)
    "mixture": (lambda: model_of(preset("tiny", attention="xla", mixture=EXPERTS)), batches("mixture")[0], {}),
    "unet": (
        lambda: jzero.from_flax(UNet, lambda net, batch: (net(batch["images"], batch["t"]) ** 2).mean()),
        {"images": FLOAT((BATCH, 16, 16, 4)), "t": FLOAT((BATCH,))},
        {
            "(start|first|down|depthwise)/kernel": 3, "time/kernel": 1, "(start|first|down|time|depthwise)/bias": 0,
            "(query|key|value)/kernel": 1, "(query|key|value)/bias": 0, "out/kernel": 0, "norm": 0,
            "up/kernel": 3, "up/bias": 0, "join/kernel": 2, "end/kernel": 2,
        },
    ),
    "odd": (lambda: model("bert"), {key: x[:, 1:] for key, x in batches("bert")[0].items()}, DIMENSIONS["bert"]),
}  # fmt: skip
IN_A_STEP = ["llama, packed", "mixture", "bert", "nnx", "linen", "dropping", "layers", "unet"]


@pytest.mark.parametrize("name", keep(IN_A_STEP, ["mixture", "dropping", "unet"]))
def test_a_train_step_has_no_primitive_on_whole_arrays(name):
    assert of_step(name).whole == ()


PAIR = ("all-gather", "reduce-scatter")
MEGATRONS = [
    ("gpt2", SEQUENCE, PAIR),
    ("llama", SEQUENCE, PAIR),
    ("vit", 18, PAIR),
    ("odd", SEQUENCE - 1, ("all-reduce",)),  # such a sequence is whole on each device
]


@pytest.mark.parametrize(("name", "length", "kinds"), keep(MEGATRONS, MEGATRONS[::3]))
def test_a_layer_of_fused_weights_moves_as_megatrons(name, length, kinds):
    """Two collectives of an activation of each kind a layer forward, and as many backward; nothing else."""
    found, step = Counter(), of_step(name)
    for move in step.all:
        if move.scope.startswith(STACK):
            found[move.part, move.kind, move.bytes] += move.times
    size = BATCH * length * WIDTH * 4
    assert found == {(part, kind, size): 2 * LAYERS for part in ("forward", "backward") for kind in kinds}
    assert step.whole == ()
