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
from jax import lax
from jax.sharding import PartitionSpec

import jzero
from jzero.model import STACK
from jzero.planner.traced_operations import moves
from jzero.spread import ModelGroup, ShardedArray, spread
from jzero.spread.division import Table, divided_dims, layer_shapes
from jzero.tree import named
from models.llama import Llama
from models.moe import MixtureConfig

ROWS, TENSOR, LAYERS = 4, 2, 2
INT = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
FLOAT = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
TOKENS = INT((ROWS, SEQUENCE))


def mesh():
    return jzero.make_mesh(tensor=TENSOR, zero=1, devices=jax.devices()[:TENSOR])


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


def of_function(f, params, table, *inputs, stacked=False):
    """What runs on whole arrays in f(params, *inputs), and in its gradient if it returns a number."""
    group = ModelGroup({"tensor": TENSOR}, {1: ("tensor",)})
    dims = divided_dims(layer_shapes(params, stacked), Table(table, "table"), "tensor", TENSOR).dims

    def spec(name, x):
        at = dims.get(name)
        at = at if at is None or not (stacked and name.startswith(f"{STACK}/")) else at + 1
        return PartitionSpec(*("tensor" if d == at else None for d in range(len(x.shape))))

    specs = {name: spec(name, x) for name, x in named(params).items()}
    leaves, treedef = jax.tree.flatten(params)

    def local(xs, *inputs):
        values = [
            ShardedArray(x, leaf.shape, tuple((axis,) if axis else () for axis in axes), weight=True)
            for x, leaf, axes in zip(xs, leaves, specs.values(), strict=True)
        ]
        out = spread(f, group)(jax.tree.unflatten(treedef, values), *inputs)
        return jax.tree.map(lambda v: group.undivided(v).x, out, is_leaf=lambda v: isinstance(v, ShardedArray))

    def both(xs, *inputs):
        results, pullback = jax.vjp(lambda xs: local(xs, *inputs), xs)
        return pullback(jax.tree.map(jnp.ones_like, results))[0] if jnp.shape(results) == () else results

    specs_in = (list(specs.values()), *(PartitionSpec() for _ in inputs))
    run = jax.shard_map(both, mesh=mesh(), in_specs=specs_in, out_specs=PartitionSpec(), check_vma=False)
    jax.eval_shape(run, leaves, *inputs)
    return [f"{fallback.primitive} ({fallback.line})" for fallback in group.traced.fallbacks]


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(self.drop(nnx.gelu(self.up(x)))))


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
    "odd": (lambda: model("bert"), {key: x[:, 1:] for key, x in batches("bert")[0].items()}, DIMENSIONS["bert"]),
}
IN_A_STEP = ["llama, packed", "mixture", "bert", "nnx", "linen", "dropout", "layers"]


@pytest.mark.parametrize("name", keep(IN_A_STEP, ["llama, packed", "mixture", "dropout", "layers"]))
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


def test_a_diffusion_u_net():
    def loss_fn(module, batch):
        a, b = jax.random.split(batch["rng"])
        images, t = batch["images"], jax.random.uniform(a, (ROWS,))
        noise = jax.random.normal(b, images.shape)
        noisy = jnp.sqrt(1 - t)[:, None, None, None] * images + jnp.sqrt(t)[:, None, None, None] * noise
        return ((module(noisy, t) - noise) ** 2).mean()

    unet = jzero.from_flax(UNet, loss_fn)
    shapes = jax.eval_shape(unet.init, jax.random.key(0))
    table = {
        "(start|first|down|time|depthwise)/kernel": -1, "(start|first|down|time|depthwise)/bias": 0,
        "(query|key|value)/kernel": 1, "(query|key|value)/bias": 0, "out/kernel": 0, "norm": 0,
        "up/kernel": 3, "up/bias": 0, "join/kernel": 2, "end/kernel": 2,
    }  # fmt: skip
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = {"images": FLOAT((ROWS, 16, 16, 4)), "rng": key}
    assert of_function(lambda p, batch, rng: unet.loss(p, batch, rng)[0], shapes, table, batch, key) == []


def generate(decoder, layers, new, params, tokens):
    """Continue prompts greedily with a cache, until all rows have token 0."""
    rows, length = tokens.shape
    one = decoder.make_cache(rows, length + new, jnp.float32)
    empty = jax.tree.map(lambda x: jnp.zeros((layers, *x.shape), x.dtype), one)

    def forward(tokens, column, cache):
        x, _ = decoder.decode_prefix(params["ends"], tokens, column, None, ())
        x, cache = lax.scan(lambda x, item: decoder.decode_block(item[0], x, item[1]), x, (params[STACK], cache))
        return decoder.decode_suffix(params["ends"], x).argmax(-1).astype(jnp.int32), cache

    token, cache = forward(tokens, 0, empty)
    found = lax.dynamic_update_slice(jnp.zeros((rows, new), jnp.int32), token[:, None], (0, 0))

    def turn(carry):
        t, token, found, cache = carry
        token, cache = forward(token[:, None], length + t, cache)
        return t + 1, token, found.at[:, t + 1].set(token), cache

    going = (jnp.int32(0), token, found, cache)
    return lax.while_loop(lambda carry: (carry[0] < new - 1) & (carry[1] != 0).any(), turn, going)[2]


def test_a_decoder_with_a_cache():
    decoder = model("llama")
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    run = partial(generate, decoder, 2, 3)
    assert of_function(run, params, decoder.divided["tensor"], TOKENS, stacked=True) == []
