"""Half precision that is half: the count of products in float32, and which arrays of a batch are cast."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.sampling import some
from helpers.steps import mesh, settings
from jax import lax

import jzero
from jzero import planner
from jzero.model import Inputs
from jzero.planner.traced_operations import matmuls
from jzero.tracing.auto_cast import inputs_of_products

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, PATCHES, WIDTH, HEADS, CLASSES = 16, 4, 16, 2, 8


class Block(nnx.Module):
    fused = False  # attention by jax.nn

    def __init__(self, rngs):
        self.norm, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, WIDTH // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.unstack(self.qkv(self.norm(x)), axis=-3)
        if self.fused:
            x = x + self.out(jax.nn.dot_product_attention(q, k, v))
        else:
            scores = jnp.einsum("bshc,bthc->bhst", q, k) / math.sqrt(WIDTH // HEADS)
            x = x + self.out(jnp.einsum("bhst,bthc->bshc", jax.nn.softmax(scores), v))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=4, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (PATCHES, WIDTH)))
        self.stack = nnx.vmap(Block)(nnx.Rngs(params=jax.random.split(rngs.params(), 2)))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def prefix(self, batch):
        x = self.patches(batch["images"])
        return x.reshape(len(x), PATCHES, WIDTH) + self.positions[...]

    def suffix(self, x, batch):
        logits = self.head(x.mean(1)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


MODEL = jzero.from_flax(ViT)
PRODUCTS = 1 + 2 * 6 + 1  # forward: the patches, six in each of two layers, the head
BACKWARD = 1 + 2 * 12 + 2  # two for each forward product, but the images have no gradient


def images():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    return {"images": rng.normal(size=(ROWS, 8, 8, 3)).astype(np.float32), "labels": labels}


def make(model, stage=0, pipe=1, precision="bf16", accum=1, devices=8, **options):
    config = settings(ROWS, stage, accum, **{precision: {"enabled": True, **options}})
    return jzero.make_train_step(model, config, mesh=mesh(devices // pipe, pipe=pipe))


@pytest.fixture(scope="module")
def plain():
    """Loss and gradients of plain Flax on one device, by (dtype of the weights, of the images)."""
    graph, weights = nnx.split(ViT(nnx.Rngs(jax.random.key(0))), nnx.Param)

    @partial(jax.jit, static_argnums=(1, 2))
    @jax.value_and_grad
    def loss(weights, dtype, of_images):
        model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), weights))
        batch = images()
        x = model.prefix(batch | {"images": batch["images"].astype(of_images)})
        x, _ = lax.scan(lambda x, layer: (nnx.merge(*layer)(x), None), x, nnx.split(model.stack))
        return model.suffix(x, batch)

    def run(*dtypes):
        value, gradients = loss(weights, *dtypes)
        return float(value), MODEL.adopt(gradients)

    return {dtype: run(dtype, dtype) for dtype in (F32, BF16)}


LAYOUTS = [(0, 1), (3, 1), (0, 2), (3, 2)]


@pytest.mark.parametrize(("stage", "pipe"), some(LAYOUTS, [(3, 2)]))
def test_float_images_do_not_widen_the_products(stage, pipe, plain):
    before = matmuls(make(MODEL, stage, pipe, auto_cast=False).trace(images()))
    assert before.float32 == before.count
    assert before.float32_share == pytest.approx(1)
    step = make(MODEL, stage, pipe)
    state = step.init(jax.random.key(0))
    gradients, metrics = step.gradients(state, images())
    after = matmuls(step.trace(images()))
    assert (after.float32, after.float32_share, after.count) == (0, 0, before.count)
    assert after.cast == ("images",)
    if pipe == 1:
        assert after.count == PRODUCTS + BACKWARD
    (_, exact), (loss, expected) = plain[F32], plain[BF16]
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-2)

    def error(found):
        return float(optax.tree.norm(jax.tree.map(jnp.subtract, jax.device_get(found), exact)))

    assert error(gradients) < 2 * error(expected)  # rounded no more than in plain Flax
    assert error(gradients) < 0.03 * float(optax.tree.norm(exact))


@pytest.mark.parametrize(("stage", "pipe"), some(LAYOUTS, [(3, 1)]))
def test_fp16_trains_on_simulated_devices(stage, pipe, plain, monkeypatch):
    """jax.nn asks for products that JAX does not lower for CPUs."""
    monkeypatch.setattr(Block, "fused", True)
    step = make(jzero.from_flax(ViT), stage, pipe, "fp16", auto_cast=True, loss_scale=128)
    gradients, metrics = step.gradients(step.init(jax.random.key(0)), images())
    loss, exact = plain[F32]
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-2)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, jax.device_get(gradients), exact))
    assert float(error / optax.tree.norm(exact)) < 1e-2
    text = " ".join(jzero.report(step).split())
    assert "- fp16 on CPU devices: matmuls that ask for float16 operands and a float32 sum by name (F16_F16_F32" in text


def test_the_report_says_what_is_not_half_and_why():
    step = make(MODEL, auto_cast=False, devices=1)
    assert "Half precision" not in jzero.report(step)
    step.prepare([images()])
    text = " ".join(jzero.report(step).split())
    total = PRODUCTS + BACKWARD
    assert f"Half precision - {total} of {total} matmuls (100% of the FLOPs) run in float32 under bf16" in text
    assert "in ViT.prefix (test_half_precision.py:" in text


def test_the_engine_prints_it_after_the_first_step(capsys):
    config = {"train_batch_size": ROWS, "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = jzero.initialize(model=net(), config=config)
    batch = jax.tree.map(lambda x: np.ones((ROWS, *x.shape[1:]), np.float32), BATCH)
    assert "Half precision" not in capsys.readouterr().out
    engine.train_batch(batch)
    assert capsys.readouterr().out == "Half precision\n  - cast to bfloat16 (bf16.auto_cast): x\n"
    assert jzero.report(engine.step_fn).endswith("Half precision\n  - cast to bfloat16 (bf16.auto_cast): x")
    engine.train_batch(batch)
    assert capsys.readouterr().out == ""


def test_reading_the_products_does_not_trace_again():
    traces = []

    def loss(n, b, extra):
        traces.append(1)
        return squares(n, b) * extra["factor"] + (n(b["x"]) * extra["like"]).mean()

    step = make(net(loss))
    batch = jax.tree.map(lambda x: np.ones((ROWS, *x.shape[1:]), np.float32), BATCH)
    step(step.init(jax.random.key(0)), batch, {"factor": 0.5, "like": np.ones(4)})
    before = len(traces)
    matmuls(step.traced)
    assert len(traces) == before


def chosen(model, batch):
    """The arrays that `auto_cast` chooses, by tracing alone."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    state = getattr(model, "state", ())
    weights = jax.tree_util.tree_map_with_path(
        lambda path, x: x if jax.tree_util.keystr(path, simple=True, separator="/") in state else
        jax.ShapeDtypeStruct(x.shape, BF16), shapes,
    )  # fmt: skip
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return set(inputs_of_products(model, weights, Inputs(batch), None, BF16))


class Net(nnx.Module):
    """A perceptron; `how` prepares its input, `dtype` is what its layers declare."""

    def __init__(self, rngs, how=lambda x: x, dtype=None):
        self.hidden, self.out = nnx.Linear(8, 8, dtype=dtype, rngs=rngs), nnx.Linear(8, 4, dtype=dtype, rngs=rngs)
        self.how = how

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(self.how(x))))


def squares(net, b):
    return ((net(b["x"]) - b["y"]) ** 2).mean()


def net(loss=squares, **options):
    return jzero.from_flax(partial(Net, **options), loss)


BATCH = {"x": jnp.zeros((4, 8)), "y": jnp.zeros((4, 4))}


def masked(net, b):
    return ((net(b["x"]) ** 2).mean(-1) * b["mask"]).sum() / b["mask"].sum()


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        (net(), {}, {"x"}),  # y: a target
        (net(masked), {"mask": jnp.zeros(4)}, {"x"}),
        (net(lambda n, b: jnp.dot((n(b["x"]) ** 2).mean(-1), b["w"])), {"w": jnp.zeros(4)}, {"x"}),
        (net(lambda n, b: ((n(b["x"]) - n(b["z"])) ** 2).mean()), {"z": jnp.zeros((4, 8))}, {"x", "z"}),
        (net(how=lambda x: x.reshape(-1, 2, 4).transpose(0, 2, 1).reshape(-1, 8) / 255), {}, {"x"}),
        (net(how=lambda x: jnp.where(jnp.arange(8) < 4, x, 0)), {}, {"x"}),
        (net(lambda n, b: lax.cond(b["z"][0] > 0, n, lambda x: n(-x), b["x"]).mean()), {"z": jnp.zeros(4)}, {"x"}),
        (net(lambda n, b: lax.cond(b["x"].sum() > 0, n, lambda x: n(-x), b["x"]).mean()), {}, set()),
        (net(lambda n, b: lax.cond(b["y"].sum() > 0, n, lambda x: n(x + 1), b["x"]).mean()), {}, set()),
        (net(how=lambda x: x - 1000.0), {}, set()),  # digits may cancel
        (net(how=jnp.sin), {}, set()),  # a time step's features
        (net(how=lambda x: x / jnp.std(x)), {}, set()),
        (net(how=lambda x: x.astype(jnp.int32).astype(BF16)), {}, set()),
        (net(how=lambda x: x.astype(BF16)), {}, set()),  # cast by the model
        (net(dtype=BF16), {}, set()),  # cast by its layers
        (net(dtype=F32), {}, set()),  # declared
        (net(lambda n, b: (n.out(n.hidden(b["x"])) ** 2).mean() + b["x"].mean()), {}, set()),  # input and target
        (net(), {"x": jnp.zeros((4, 8), jnp.int32)}, set()),
        (net(), {"x": jnp.zeros((4, 8), BF16)}, set()),
        (jzero.from_flax(Net, criterion=lambda out, y: ((out - y) ** 2).mean()), None, {"0"}),
    ],
)
def test_what_is_cast(model, more, expected):
    batch = (BATCH["x"], BATCH["y"]) if more is None else BATCH | more
    assert chosen(model, batch) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(None, {"x"}), (F32, set()), (BF16, set())])
def test_linen_layers_keep_the_dtype_that_they_declare(dtype, expected):
    class Perceptron(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(8, (3, 3), dtype=dtype)(x)
            return linen.Dense(4, dtype=dtype)(nnx.relu(linen.BatchNorm(False, dtype=dtype)(x)).mean((1, 2)))

    batch = {"x": jnp.zeros((4, 6, 6, 3)), "y": jnp.zeros((4, 4))}
    assert chosen(jzero.from_flax(Perceptron(), squares, example_batch=batch), batch) == expected


def test_a_layer_in_float32_keeps_the_input_that_it_shares():
    class Mixed(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.gate = nnx.Linear(8, 4, dtype=F32, rngs=rngs)

        def __call__(self, x):
            return super().__call__(x) * self.gate(x)

    assert chosen(jzero.from_flax(Mixed, squares), BATCH) == set()


def test_a_scan_over_time():
    def scanned(n, b):
        h = jnp.zeros((4, 8), BF16)
        h, _ = lax.scan(lambda h, x: (n.hidden(h) + n.hidden(x), None), h, b["x"][None])
        return (h**2).mean() - b["y"].mean()

    def carried(n, b):
        h, _ = lax.scan(lambda h, _: (n.hidden(h).astype(h.dtype), None), b["x"], length=3)
        return (h**2).mean()

    class Recurrent(nnx.Module):
        """Its cell's carry is float32, and so are its products."""

        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.SimpleCell(8, 4, rngs=rngs))

        def __call__(self, x):
            return self.rnn(x[None])[0]

    assert chosen(net(scanned), BATCH) == set()  # without the cast the carry changes its dtype: nothing to trace
    assert chosen(net(carried), BATCH) == {"x"}
    assert chosen(jzero.from_flax(Recurrent, squares), BATCH) == set()


def test_a_model_that_refuses_the_cast_is_left_alone():
    class Strict(Net):
        def __call__(self, x):
            return self.hidden(lax.mul(x, jnp.ones((4, 8), F32)))  # lax promotes nothing

    assert chosen(jzero.from_flax(Strict, lambda n, b: n(b["x"]).mean()), BATCH) == set()


def test_the_optimizer_is_not_counted():
    model = jzero.from_flax(partial(Net, dtype=BF16), squares)
    config = {"train_batch_size": 8, "bf16": {"enabled": True}, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
    step = jzero.make_train_step(model, config)
    found = planner.matmuls(step.trace({"x": jnp.zeros((8, 8)), "y": jnp.zeros((8, 4))}))
    assert (found.float32, found.count) == (0, 5)


@pytest.mark.slow
def test_accumulation_counts_every_micro_batch():
    shapes = images()
    once, twice = (matmuls(make(MODEL, accum=accum, devices=2).trace(shapes)) for accum in (1, 4))
    assert twice.count == 4 * once.count
    assert twice.flops == once.flops


class Normed(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.conv = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


@pytest.mark.parametrize("dtype", [None, BF16])
def test_the_statistics_of_batch_norm_do_not_widen_what_they_normalize(dtype):
    step = make(jzero.from_flax(partial(Normed, dtype=dtype), squares))
    shapes = {"x": jnp.ones((ROWS, 8, 8, 3)), "y": jnp.ones((ROWS, 4))}
    found = matmuls(step.trace(shapes))
    assert (found.float32, found.count) == (0, 5)
    assert {x.dtype for x in jax.tree.leaves(step.state_shapes.params["norm"])} == {jnp.dtype(F32)}
    wide = matmuls(make(jzero.from_flax(partial(Normed, dtype=F32), squares)).trace(shapes))
    assert (wide.float32, wide.count) == (3, 5)  # declared, and so are the products after it
