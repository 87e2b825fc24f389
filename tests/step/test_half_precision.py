"""Half precision that is half: the count of products in float32, and which arrays of a batch are cast."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.drawn import random_params
from helpers.sampling import keep
from helpers.steps import mesh, settings
from jax import lax

import jzero
from jzero.model import Inputs
from jzero.planner.traced_operations import matmuls
from jzero.tracing.auto_cast import inputs_of_products

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, PATCHES, WIDTH, HEADS, CLASSES = 16, 4, 16, 2, 8


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, WIDTH // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return x + self.out(jax.nn.dot_product_attention(*jnp.unstack(self.qkv(self.norm(x)), axis=-3)))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=4, rngs=rngs)
        self.stack = nnx.vmap(Block)(nnx.Rngs(params=jax.random.split(rngs.params(), 2)))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def prefix(self, batch):
        return self.patches(batch["images"]).reshape(-1, PATCHES, WIDTH)

    def suffix(self, x, batch):
        logits = self.head(x.mean(1)).astype(F32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


MODEL = jzero.from_flax(ViT)
FORWARD = 1 + 2 * 4 + 1  # the patches, four in each of two layers, the head
PRODUCTS = FORWARD + 2 * FORWARD - 1  # two backward for each forward one, but the images have no gradient


def images():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    return {"images": rng.normal(size=(ROWS, 8, 8, 3)).astype(np.float32), "labels": labels}


def make(model, stage=0, pipe=1, precision="bf16", devices=8, **options):
    muon = {"type": "Muon", "params": {"lr": 0.1}}  # whose own products do not count
    more = {"optimizer": muon, "stack": {"unroll": False}, precision: {"enabled": True, **options}}
    config = settings(ROWS, stage, **more)
    return jzero.make_train_step(model, config, mesh=mesh(devices // pipe, pipe=pipe))


@pytest.mark.parametrize(("stage", "pipe"), keep(product([0, 3], [1, 2]), [(3, 2)]))
def test_float_images_do_not_widen_the_products(stage, pipe):
    before, after = (matmuls(make(MODEL, stage, pipe, auto_cast=cast).trace(images())) for cast in (False, "auto"))
    assert before.float32 == before.count
    assert before.float32_share == pytest.approx(1)
    assert (after.float32, after.float32_share, after.count) == (0, 0, before.count)
    assert after.cast == ("images",)
    assert pipe > 1 or after.count == PRODUCTS


def plain_gradient():
    """Compute loss and gradients by plain Flax on one device."""
    graph, weights = nnx.split(ViT(nnx.Rngs(jax.random.key(0))), nnx.Param)

    def loss(weights):
        model, batch = nnx.merge(graph, weights), images()
        x, _ = lax.scan(lambda x, layer: (nnx.merge(*layer)(x), None), model.prefix(batch), nnx.split(model.stack))
        return model.suffix(x, batch)

    return jax.jit(jax.value_and_grad(loss))(weights)


@pytest.mark.slow
def test_fp16_trains_on_simulated_devices():
    """jax.nn asks for products that JAX does not lower for CPUs."""
    step = make(MODEL, 3, 1, "fp16", auto_cast=True, loss_scale=128)
    gradients, metrics = step.gradients(step.init(jax.random.key(0)), images())
    loss, exact = plain_gradient()
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-2)
    difference = jax.tree.map(jnp.subtract, jax.device_get(gradients), exact := MODEL.adopt(exact))
    assert optax.tree.norm(difference) / optax.tree.norm(exact) < 0.01
    words = "- fp16 on CPU devices: matmuls that ask for float16 operands and a float32 sum by name (F16_F16_F32"
    assert words in " ".join(jzero.report(step).split())


def test_the_report_says_what_is_not_half_and_why():
    step = make(MODEL, auto_cast=False, devices=1)
    step.prepare([images()])
    text = " ".join(jzero.report(step).split())
    assert f"Half precision - {PRODUCTS} of {PRODUCTS} matmuls (100% of the FLOPs) run in float32 under bf16" in text
    assert "in ViT.prefix (test_half_precision.py:" in text


class Net(nnx.Module):
    """A perceptron; `how` prepares its input, `dtype` is what its layers declare."""

    def __init__(self, rngs, how=lambda x: x, dtype=None):
        self.hidden, self.out = nnx.Linear(8, 8, dtype=dtype, rngs=rngs), nnx.Linear(8, 4, dtype=dtype, rngs=rngs)
        self.how = how

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(self.how(x))))


class Perceptron(linen.Module):
    dtype: jnp.dtype | None = None

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(8, (3,), dtype=self.dtype)(x[..., None])
        return linen.Dense(4, dtype=self.dtype)(nnx.relu(linen.BatchNorm(False, dtype=self.dtype)(x)).mean(1))


def squares(net, b):
    return ((net(b["x"]) - b["y"]) ** 2).mean()


def scanned(n, b):
    """Without the cast the carry changes its dtype: nothing to trace."""
    h, _ = lax.scan(lambda h, x: (n.hidden(h) + n.hidden(x), None), jnp.zeros((4, 8), BF16), b["x"][None])
    return (h**2).mean() - b["y"].mean()


def carried(n, b):
    h, _ = lax.scan(lambda h, _: (n.hidden(h).astype(h.dtype), None), b["x"], length=3)
    return (h**2).mean()


# Its cell's carry is float32, and so are its products.
RECURRENT = jzero.from_flax(
    lambda rngs: nnx.RNN(nnx.SimpleCell(8, 4, rngs=rngs)), lambda n, b: ((n(b["x"][None])[0] - b["y"]) ** 2).mean()
)
BATCH = {"x": jnp.zeros((4, 8)), "y": jnp.zeros((4, 4))}


def net(loss=squares, **options):
    return jzero.from_flax(partial(Net, **options), loss)


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        (net(), {}, {"x"}),  # y: a target
        (net(lambda n, b: jnp.dot((n(b["x"]) ** 2).mean(-1), b["w"])), {"w": jnp.zeros(4)}, {"x"}),
        (net(lambda n, b: ((n(b["x"]) - n(b["z"])) ** 2).mean()), {"z": jnp.zeros((4, 8))}, {"x", "z"}),
        (net(how=lambda x: x.reshape(-1, 2, 4).transpose(0, 2, 1).reshape(-1, 8) / 255), {}, {"x"}),
        (net(lambda n, b: lax.cond(b["z"][0] > 0, n, lambda x: n(-x), b["x"]).mean()), {"z": jnp.zeros(4)}, {"x"}),
        (net(lambda n, b: lax.cond(b["x"].sum() > 0, n, lambda x: n(-x), b["x"]).mean()), {}, set()),
        (net(scanned), {}, set()),
        (net(carried), {}, {"x"}),
        (net(how=lambda x: x - 1000.0), {}, set()),  # digits may cancel
        (net(how=jnp.sin), {}, set()),  # a time step's features
        (net(how=lambda x: x.astype(jnp.int32).astype(BF16)), {}, set()),
        (net(dtype=BF16), {}, set()),  # cast by its layers
        (net(lambda n, b: (n.out(n.hidden(b["x"])) ** 2).mean() + b["x"].mean()), {}, set()),  # input and target
        (net(), {"x": jnp.zeros((4, 8), jnp.int32)}, set()),
        (net(lambda n, b: (n(b["x"]) * (b["x"] @ n.out.kernel.astype(F32))).mean()), {}, set()),  # in float32 too
        (net(how=lambda x: lax.mul(x, jnp.ones((4, 8), F32))), {}, set()),  # lax promotes nothing
        (RECURRENT, {}, set()),
        *[
            (jzero.from_flax(Perceptron(dtype), squares, example_batch=BATCH), {}, found)
            for dtype, found in ((None, {"x"}), (F32, set()), (BF16, set()))
        ],
        (jzero.from_flax(Net, criterion=lambda out, y: ((out - y) ** 2).mean()), None, {"0"}),
    ],
)
def test_what_is_cast(model, more, expected):
    batch = (BATCH["x"], BATCH["y"]) if more is None else BATCH | more
    weights, state = jax.eval_shape(model.init, jax.random.key(0)), getattr(model, "state", ())
    weights = jax.tree_util.tree_map_with_path(
        lambda path, x: x if jax.tree_util.keystr(path, simple=True, separator="/") in state else x.update(dtype=BF16),
        weights,
    )  # fmt: skip
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    assert set(inputs_of_products(model, weights, Inputs(shapes), None, BF16)) == expected


WIDE_BATCH = {name: np.ones((ROWS, *x.shape[1:]), np.float32) for name, x in BATCH.items()}


def test_the_engine_prints_it_after_the_first_step(capsys):
    config = settings(ROWS, bf16={"enabled": True})
    engine, *_ = jzero.initialize(model=net(), config=config, params=random_params(net()))
    words = "Half precision\n  - cast to bfloat16 (bf16.auto_cast): x\n"
    assert "Half precision" not in jzero.report(engine.step_fn)
    capsys.readouterr()
    printed = []
    for _ in range(2):
        engine.train_batch(WIDE_BATCH)
        printed.append(capsys.readouterr().out)
    assert printed == [words, ""]
    assert jzero.report(engine.step_fn).endswith(words.strip())


class Normed(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.conv = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


@pytest.mark.parametrize(("dtype", "wide"), [(None, 0), (BF16, 0), (F32, 3)])  # declared, as the products after it
def test_the_statistics_of_batch_norm_do_not_widen_what_they_normalize(dtype, wide):
    step = make(jzero.from_flax(partial(Normed, dtype=dtype), squares))
    batch = {"x": np.ones((ROWS, 8, 8, 3), np.float32), "y": np.ones((ROWS, 4), np.float32)}
    found = matmuls(step.trace(batch))
    assert (found.float32, found.count) == (wide, 5)
    assert {x.dtype for x in jax.tree.leaves(step.state_shapes.params["norm"])} == {jnp.dtype(F32)}
