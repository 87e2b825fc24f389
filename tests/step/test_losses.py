"""Models and what their losses may return. Oracle: plain JAX with a mean."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.drawn import random_params
from helpers.oracle import mean_of, stacked_loss
from helpers.reference import Decoder
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, settings

import jzero

ROWS, WIDTH = 16, 8
WEIGHTS = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32)
W = np.ones((2, WIDTH), np.float32)


class Linear:
    """y = x w, with a loss of the test's choice and parameters beside w."""

    def __init__(self, loss, **more):
        self.loss, self.more = loss, more

    def init(self, rng):
        return {"w": WEIGHTS, **self.more}


def squares(params, batch):
    return ((batch["x"] @ params["w"]).astype(jnp.float32) ** 2).sum(-1)


BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)}


def make(model, *, on=None, optimizer=None, **more):
    config = settings(**{"rows": ROWS, "stage": 3, "accum": 2, "lr": 0.01, **more})
    return jzero.make_train_step(model, config, optimizer=optimizer, mesh=on or mesh())


def one_step(model, data=BATCH, **more):
    step = make(model, **more)
    return step(step.init(jax.random.key(0)), data)


def ours_and_plain(model, data, params=None, half=lambda params: params, **more):
    """(gradients, metrics) of the step, and (loss, gradients) of the mean in plain JAX."""
    step = make(model, **more)
    state = step.init(jax.random.key(0), params)
    plain = jax.jit(jax.value_and_grad(lambda params: mean_of(model)(half(params), data)))
    return step.gradients(state, data), jax.device_get(plain(jax.device_get(state.params)))


@pytest.mark.parametrize("count", [lambda p, b, rng: (rng is not None) * 64.0, lambda p, b, rng: p["w"].size * 1.0])
def test_a_count_may_depend_on_anything(count):
    """The forward pass is there once: a print prints once a micro-batch and replica, and real numbers."""
    seen = []

    def loss(params, batch, rng):
        total = squares(params, batch).sum()
        jax.debug.callback(lambda x: seen.append(float(x)), total)
        return jzero.Mean(total, count(params, batch, rng))

    _, metrics = one_step(Linear(loss))
    jax.effects_barrier()
    assert len(seen) == 4 * 2
    assert np.isfinite(seen).all()
    y, count = BATCH["x"] @ WEIGHTS, 4 * 2 * 64
    assert float(metrics["loss"]) == pytest.approx((y**2).sum() / count, rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(2 * BATCH["x"].T @ y / count), rel=1e-6)


def test_an_integer_leaf_is_carried_along():
    order = np.arange(WIDTH, dtype=np.int32)[::-1]

    def loss(p, b, rng):
        return (squares(p, b) * p["order"].sum()).mean() + b["x"][:, p["order"]].mean()

    state, metrics = one_step(Linear(loss, order=order))
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params["order"], order)


def test_parameters_that_are_one_array():
    bare = SimpleNamespace(
        init=lambda rng: WEIGHTS, loss=lambda params, batch, rng: squares({"w": params}, batch).mean()
    )
    step = make(bare, optimizer=optax.chain(optax.adam(0.01), optax.contrib.reduce_on_plateau(patience=1)))
    assert step.state_shardings.opt_state[0][0].mu == step.state_shardings.params
    assert step.state_shardings.params.spec == jax.sharding.PartitionSpec("zero")
    state, metrics = step(step.init(jax.random.key(0)), BATCH)
    assert optax.tree.get(state.opt_state, "best_value") == pytest.approx(float(metrics["loss"]))


def test_where_nothing_counts_nothing_moves():
    step = make(Linear(lambda p, b, rng: jzero.Mean((squares(p, b) * 0).sum(), 0.0)))
    state = step.init(jax.random.key(0))
    assert float(step.evaluate(state, BATCH)) == 0
    state, metrics = step(state, BATCH)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    np.testing.assert_array_equal(state.params["w"], WEIGHTS)


class Layers(Decoder):
    def __init__(self, params):
        self.init = lambda rng: params


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Linear(lambda *given: 0.0, phase=np.ones(3, np.complex64)), r"'phase' is complex64.*two real arrays"),
        (Layers({"ends": {}, "layers": {"w": np.ones((2, 8, 8))}}), r"'ends', 'stack'.*returned \['ends', 'layers'\]"),
        (Layers({"ends": {}, "stack": {"w": W, "v": np.ones((3, 8))}}), r"stack/v \(3,\).*stack/w \(2,\)"),
    ],
)
def test_parameters_that_are_refused(model, message):
    refuses(lambda: make(model), message)


PAIR = r"a tuple of 2 values: return jzero.Mean\(sum, count\).*has_aux=True and return \(loss, {name: metric}\)"
SCALAR = r"it must be a scalar or jzero.Mean\(sum, count\)"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: (x, {"accuracy": x}), PAIR),
        (lambda x: {"loss": x}, f"loss is a dict: {SCALAR}"),
        (lambda x: x[None], rf"loss has shape \(1,\): {SCALAR}"),
        (lambda x: x > 0, "loss is bool, which has no gradient"),
        (lambda x: 3, "loss is int32, which has no gradient: it must be a float"),
        (lambda x: jzero.Mean((x > 0).sum(), 4.0), "loss is int32, which has no gradient"),
        (lambda x: x * 1j, "loss is complex64: it must be real"),
    ],
)
def test_a_loss_with_other_outputs_is_refused(output, message):
    refuses(lambda: make(Linear(lambda p, b, rng: output(squares(p, b).mean()))).trace(BATCH), message)


SCALE = 2.0**16  # fp16's default start
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 32, size=(16, 9))


class Pixels:
    def __init__(self, width, count):
        self.width, self.count = width, count

    def init(self, rng):
        return {"w": WEIGHTS[: self.width, : self.width] / self.width}

    def loss(self, params, batch, rng):
        x = batch["x"].astype(params["w"].dtype)
        squares = (x @ params["w"] - batch["y"].astype(x.dtype)) ** 2
        return jzero.Mean(squares.sum(dtype=jnp.float32), self.count(batch))


@pytest.mark.slow
def test_a_regression_on_fields_trains():
    """Of 1.6 million floats a micro-batch nothing overflows in fp16, and no gradient underflows."""
    x = RNG.normal(size=(8, 90, 180, 8)).astype(np.float32)
    model, batch = Pixels(8, lambda batch: batch["y"].size), {"x": x, "y": 0.5 * x}
    step = make(model, rows=8, stage=2, accum=1, on=mesh(2), fp16={"enabled": True})
    found, _ = step.gradients(step.init(jax.random.key(0)), batch)
    half = jax.tree.map(lambda p: p.astype(jnp.float16), model.init(None))
    plain = jax.grad(lambda p: mean_of(model)(p, batch) * SCALE)(half)["w"].astype(jnp.float32) / SCALE
    assert np.asarray(plain).all()
    np.testing.assert_allclose(found["w"], plain, rtol=1e-3)


def test_an_infinite_count_skips_the_step():
    """A count that overflows in float16 must not divide the gradients to zero."""
    data = {"x": np.ones((8, 4), "f"), "y": np.zeros((8, 4), "f"), "mask": np.full((8, 4), 30_000, "f")}
    model, fp16 = Pixels(4, lambda batch: batch["mask"].sum()), {"enabled": True, "auto_cast": True}
    assert one_step(model, data, rows=8, stage=2, accum=1, on=mesh(2), fp16=fp16)[1]["skipped"]


def test_unequal_counts_are_one_mean():
    """Micro-batches and replicas with 0 to all labels: the gradient is twice that of the global mean."""
    labels = np.where(RNG.random((16, 8)) < np.linspace(-0.5, 1.5, 16)[:, None], TOKENS[:, 1:], -1)
    batch, model = {"inputs": TOKENS[:, :-1], "labels": labels}, Decoder(2, tied=True, vocab=32)
    (found, metrics), (loss, plain) = ours_and_plain(
        model, batch, random_params(model), stage=2, accum=4, on=mesh(2, pipe=2), gradient_allreduce_op="sum"
    )
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    plain = jax.tree.map(lambda g: 2 * g, plain)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, plain)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(plain)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)


LAYOUTS = [({"zero": 1}, 0), ({"zero": 2}, 1), ({"zero": 4}, 3), ({"pipe": 2, "zero": 2}, 2)]


class Weighed(Decoder):
    """Learns how much each row counts, so that the count has a gradient."""

    def init(self, rng):
        params = super().init(rng)
        return params | {"ends": params["ends"] | {"weigh": jnp.linspace(-1, 1, 16)}}

    def suffix(self, ends, x, batch, rng):
        weights = jax.nn.sigmoid(x @ ends["weigh"].astype(x.dtype)).astype(jnp.float32)
        logits = (x @ ends["embed"].T.astype(x.dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jzero.Mean((losses * weights).sum(), weights.sum())


@pytest.mark.parametrize(("degrees", "stage"), keep(LAYOUTS, LAYOUTS[2:3]))
@pytest.mark.parametrize("fp16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_count_with_a_gradient(degrees, stage, fp16):
    """The gradient is that of sum / count in plain JAX; it includes the count's.

    In fp16 both sides round products to 11 bits, in another order: hence its bounds.
    """
    batch, model = {"inputs": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}, Weighed(4, tied=True, vocab=32)
    half = partial(jax.tree.map, lambda w: w.astype(jnp.float16) if fp16 else w)
    more = {"fp16": {"enabled": fp16, "initial_scale_power": 8}, "stack": {"unroll": False}}
    (found, metrics), (loss, plain) = ours_and_plain(model, batch, half=half, stage=stage, on=mesh(**degrees), **more)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=2e-3 if fp16 else 1e-6)
    for x, y in zip(*map(jax.tree.leaves, (jax.device_get(found), plain)), strict=True):
        np.testing.assert_allclose(x / abs(y).max(), y / abs(y).max(), atol=2e-2 if fp16 else 2e-6)


class Masked:
    """Draws a mask in the prefix; `loss` draws another one, so only the passes know the count."""

    def init(self, rng):
        return {"ends": {"w": jnp.ones(())}, "stack": {"w": jnp.ones((2, 2))}}

    def prefix(self, ends, batch, rng):
        return {"x": batch["x"] * ends["w"], "mask": jax.random.bernoulli(rng, 0.5, batch["x"].shape)}

    def block(self, layer, x, rng):
        return {**x, "x": x["x"] * layer["w"][0]}

    def suffix(self, ends, x, batch, rng):
        return jzero.Mean(jnp.sum(x["x"], where=x["mask"]), x["mask"].sum())

    def loss(self, params, batch, rng):
        return stacked_loss(self, params, batch, jax.random.fold_in(rng, 99))


@pytest.mark.parametrize(("degrees", "stage"), keep([LAYOUTS[1], LAYOUTS[3]], [LAYOUTS[3]]))
def test_a_random_count_of_a_stack(degrees, stage):
    """The mean of ones times w has the gradient 1, whatever the mask, if the count is that of the same mask."""
    ones = {"x": np.ones((16, 5), "f")}
    state, metrics = one_step(Masked(), ones, stage=stage, on=mesh(**degrees), lr=0.25)
    assert float(metrics["loss"]) == pytest.approx(1, rel=1e-6)
    assert float(state.params["ends"]["w"]) == pytest.approx(1 - 0.25, rel=1e-6)
