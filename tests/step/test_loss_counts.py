"""A loss of (sum, count) has the range of a mean, whatever the batch contains. Oracle: plain JAX with a mean."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.oracle import mean_of, stacked_loss
from helpers.sampling import keep
from helpers.steps import mesh, settings

import jzero
from jzero.pipeline.vocab_parallel import cross_entropy

SCALE = 2.0**16  # fp16's default start


class Pixels:
    """Predict `y` from `x` for every element; per-channel weights."""

    def __init__(self, mean: bool, width: int):
        self.mean, self.width = mean, width

    def init(self, rng):
        return {"w": jax.random.normal(rng, (self.width, self.width)) / self.width}

    def loss(self, params, batch, rng):
        x = batch["x"].astype(params["w"].dtype) / (255 if batch["x"].dtype == jnp.uint8 else 1)
        squares = (x @ params["w"] - batch["y"].astype(x.dtype)) ** 2
        whole = squares.sum(dtype=jnp.float32)
        return whole / squares.size if self.mean else jzero.Mean(whole, squares.size)


def keep_gradients() -> optax.GradientTransformation:
    """Do not train; the state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: params, lambda g, state, params=None: (jax.tree.map(jnp.zeros_like, g), g)
    )


def make(model, rows, devices: int = 2, optimizer=None, **more):
    config = settings(rows, 2, **{"fp16": {"enabled": True}, **more})
    return jzero.make_train_step(model, config, optimizer=optimizer, mesh=mesh(devices))


def plain_gradient(model, batch):
    """Return the loss and the gradient of sum / count in plain JAX."""
    return jax.jit(jax.value_and_grad(mean_of(model)))(model.init(jax.random.key(0)), batch)


@pytest.mark.slow
def test_a_regression_on_fields_trains():
    """1.6 million floats a micro-batch, no integers: the count cannot be guessed from the batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 90, 180, 8)).astype(np.float32)
    batch = {"x": x, "y": (x @ (np.eye(8) * 0.5)).astype(np.float32)}
    step = make(Pixels(False, 8), 8)
    state = step.init(jax.random.key(0))
    params, losses = Pixels(True, 8).init(jax.random.key(0)), []
    gradient = jax.jit(jax.value_and_grad(lambda params: Pixels(True, 8).loss(params, batch, None)))
    for _ in range(20):
        state, metrics = step(state, batch)
        loss, grads = gradient(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        assert not metrics["skipped"]
        losses.append((float(metrics["loss"]), float(loss)))
    np.testing.assert_allclose(*np.array(losses).T, rtol=1e-2)
    assert losses[-1][0] < losses[0][0] * 0.9


@pytest.mark.slow
def test_no_gradient_underflows_on_images():
    """Bytes, 224 x 224 x 3, and a count of images: a guess from the largest integer leaf would divide by the pixels."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, size=(4, 224, 224, 3)).astype(np.uint8)  # dark: small gradients
    batch = {"x": x, "y": np.zeros((4, 1, 1, 3), np.float32)}

    class Images(Pixels):
        def loss(self, params, batch, rng):
            return jzero.Mean(4 * super().loss(params, batch, rng), 4.0)

    model = Images(True, 3)
    step = make(model, 4, devices=1, optimizer=keep_gradients())
    state, metrics = step(step.init(jax.random.key(0)), batch)
    params = model.init(jax.random.key(0))
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    plain = jax.grad(lambda p: Pixels(True, 3).loss(p, batch, None) * SCALE)(half)["w"].astype(jnp.float32) / SCALE
    assert not metrics["skipped"]
    found = np.asarray(state.opt_state["w"])
    assert (found == 0).sum() == (np.asarray(plain) == 0).sum() == 0
    np.testing.assert_allclose(found, plain, rtol=1e-3)


class Tokens:
    """Prefix, one block, suffix; counts the labels that are not negative."""

    def init(self, rng):
        a, b = jax.random.split(rng)
        return {
            "ends": {"table": jax.random.normal(a, (32, 16))},
            "stack": {"w": jax.random.normal(b, (4, 16, 16)) / 4},
        }

    def prefix(self, ends, batch, rng):
        return ends["table"][batch["inputs"]]

    def block(self, layer, x, rng):
        return x + jnp.tanh(x @ layer["w"])

    def suffix(self, ends, x, batch, rng):
        return cross_entropy(x, ends["table"].T, batch["labels"])

    loss = stacked_loss


@pytest.mark.parametrize(("reduction", "pipe"), keep(product(["mean", "sum"], [1, 2]), [("mean", 2)]))
def test_unequal_counts_are_one_mean(pipe, reduction):
    """Micro-batches and replicas with 0 to all labels: the gradient is that of the global mean."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, size=(16, 9))
    labels = np.where(rng.random((16, 8)) < np.linspace(0, 1, 16)[:, None], tokens[:, 1:], -1)
    batch = {"inputs": tokens[:, :-1], "labels": labels}
    config = settings(16, 2, accum=4, gradient_allreduce_op=reduction, mesh={"pipe": pipe, "zero": 2})
    step = jzero.make_train_step(Tokens(), config, mesh=mesh(2, pipe=pipe), optimizer=keep_gradients())
    state, metrics = step(step.init(jax.random.key(0)), batch)
    loss, plain = plain_gradient(Tokens(), batch)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    factor = 2 if reduction == "sum" else 1
    for ours, theirs in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, factor * theirs, rtol=1e-5, atol=1e-6)


def test_a_count_that_depends_on_the_parameters():
    """Only confident rows count: known after a forward pass alone."""

    class Confident(Pixels):
        def loss(self, params, batch, rng):
            y = batch["x"] @ params["w"]
            counted = jnp.abs(y) > 0.5
            return jzero.Mean(jnp.sum(y**2, where=counted), counted.sum())

    x = np.random.default_rng(0).normal(size=(8, 64, 4)).astype(np.float32)
    model = Confident(False, 4)
    step = make(model, 8, gradient_accumulation_steps=2, fp16={"enabled": False}, optimizer=keep_gradients())
    state, metrics = step(step.init(jax.random.key(0)), {"x": x})
    loss, plain = plain_gradient(model, {"x": x})
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_allclose(state.opt_state["w"], plain["w"], rtol=1e-5)


def test_a_mask_that_the_layers_pass_along():
    """Every layer hands the next mask on: the loss counts with the last one, though two leaves begin as one array."""

    class Handing:
        def init(self, rng):
            return {"ends": {"w": jnp.ones(())}, "stack": {"w": jnp.ones((2, 4, 4))}}

        def prefix(self, ends, batch, rng):
            first, last = batch["first"], batch["last"]
            return {"x": batch["x"], "now": first, "next": first, "last": last}

        def block(self, layer, x, rng):
            return {"x": x["x"] @ layer["w"], "now": x["next"], "next": x["last"], "last": x["last"]}

        def suffix(self, ends, x, batch, rng):
            return jzero.Mean(jnp.sum(x["x"] ** 2 * x["now"][:, None]) * ends["w"], x["now"].sum())

        def loss(self, params, batch, rng):
            x = self.prefix(params["ends"], batch, rng)
            for i in range(2):
                x = jax.jit(self.block)(jax.tree.map(lambda w, i=i: w[i], params["stack"]), x, rng)
            return self.suffix(params["ends"], x, batch, rng)

    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(8, 4)).astype("f"), "first": np.ones(8, "f"), "last": (np.arange(8) < 3).astype("f")}
    step = make(Handing(), 8, fp16={"enabled": False}, optimizer=keep_gradients())
    state, _ = step(step.init(jax.random.key(0)), data)
    _, plain = plain_gradient(Handing(), data)
    for ours, theirs in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_an_infinite_count_skips_the_step():
    """A count that overflows in float16 must not divide the gradients to zero."""

    class Masked(Pixels):
        def loss(self, params, batch, rng):
            total, _ = super().loss(params, batch, rng)
            return jzero.Mean(total, batch["mask"].sum())

    data = {"x": np.ones((8, 4), "f"), "y": np.zeros((8, 4), "f"), "mask": np.full((8, 4), 30_000, "f")}
    step = make(Masked(False, 4), 8, fp16={"enabled": True, "auto_cast": True})
    _, metrics = step(step.init(jax.random.key(0)), data)
    assert metrics["skipped"]


class Weighed(Tokens):
    """Learns how much each row counts, so that the count has a gradient."""

    def init(self, rng):
        params = super().init(rng)
        return {**params, "ends": {**params["ends"], "weigh": jnp.linspace(-1, 1, 16)}}

    def suffix(self, ends, x, batch, rng):
        weights = jax.nn.sigmoid(x @ ends["weigh"].astype(x.dtype)).astype(jnp.float32)
        logits = (x @ ends["table"].T.astype(x.dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jzero.Mean((losses * weights).sum(), weights.sum())


LAYOUTS = [
    *({"mesh": {"zero": zero}, "zero_optimization": {"stage": stage}} for zero, stage in [(1, 0), (2, 1), (4, 3)]),
    *({"mesh": {"pipe": pipe, "zero": 2}, "zero_optimization": {"stage": stage}} for pipe, stage in [(2, 2), (4, 1)]),
]


def lay_out(model, layout, **more):
    """Make a step of two micro-batches that keeps its gradients."""
    config = settings(16, accum=2, **layout, **more)
    return jzero.make_train_step(model, config, mesh=mesh(**layout["mesh"]), optimizer=keep_gradients())


@pytest.mark.parametrize("layout", keep(LAYOUTS, LAYOUTS[2:3]), ids=str)
@pytest.mark.parametrize("fp16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_count_with_a_gradient(layout, fp16):
    """The gradient is that of sum / count in plain JAX; it includes the count's.

    In fp16 both sides round products to 11 bits, in another order: hence its bounds.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, size=(16, 9))
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    step = lay_out(Weighed(), layout, fp16={"enabled": fp16, "initial_scale_power": 8})
    state = step.init(jax.random.key(0))
    alone, _ = step.gradients(state, batch)
    state, metrics = step(state, batch)

    def mean(params):
        half = jax.tree.map(lambda w: w.astype(jnp.float16) if fp16 else w, params)
        return mean_of(Weighed())(half, batch)

    loss, plain = jax.jit(jax.value_and_grad(mean))(Weighed().init(jax.random.key(0)))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=2e-3 if fp16 else 1e-6)
    for ours, also, theirs in zip(*map(jax.tree.leaves, (state.opt_state, alone, plain)), strict=True):
        largest = np.abs(theirs).max()
        for found in (ours, also):
            np.testing.assert_allclose(found / largest, theirs / largest, atol=2e-2 if fp16 else 2e-6)


class Masked(Tokens):
    """Draws a mask in the prefix; `loss` draws another one, so only the passes know the count."""

    def init(self, rng):
        return {"ends": {"w": jnp.ones(())}, "stack": {"w": jnp.ones((4, 2))}}

    def prefix(self, ends, batch, rng):
        return {"x": batch["x"] * ends["w"], "mask": jax.random.bernoulli(rng, 0.5, batch["x"].shape)}

    def block(self, layer, x, rng):
        return {**x, "x": x["x"] * layer["w"][0]}

    def suffix(self, ends, x, batch, rng):
        return jzero.Mean(jnp.sum(x["x"], where=x["mask"]), x["mask"].sum())

    def loss(self, params, batch, rng):
        return stacked_loss(self, params, batch, jax.random.fold_in(rng, 99))


@pytest.mark.parametrize("layout", keep([LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]], [LAYOUTS[3]]), ids=str)
def test_a_random_count_of_a_stack(layout):
    """The mean of ones times w has the gradient 1, whatever the mask, if the count is that of the same mask."""
    step = lay_out(Masked(), layout)
    state, metrics = step(step.init(jax.random.key(0)), {"x": np.ones((16, 5), "f")})
    assert float(metrics["loss"]) == pytest.approx(1, rel=1e-6)
    assert float(state.opt_state["ends"]["w"]) == pytest.approx(1, rel=1e-6)
