"""What a model may be and return: counts of every kind, odd leaves, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.refusals import refuses
from helpers.steps import mesh, settings

import jzero

ROWS, WIDTH = 16, 8
W = jnp.ones((2, WIDTH))


class Linear:
    """y = x w, with a loss of the test's choice and parameters beside w."""

    def __init__(self, loss, **more):
        self.loss, self.more = loss, more

    def init(self, rng):
        return {"w": jax.random.normal(rng, (WIDTH, WIDTH)), **self.more}


def squares(params, batch):
    return ((batch["x"] @ params["w"]).astype(jnp.float32) ** 2).sum(-1)


def mean_square(params, batch, rng):
    return squares(params, batch).mean()


def batch(**more):
    return {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32), **more}


def make(model, optimizer=None, **more):
    config = settings(ROWS, 3, accum=2, lr=0.01, **more)
    return jzero.make_train_step(model, config, optimizer=optimizer, mesh=mesh())


def one_step(model, data, **more):
    step = make(model, **more)
    return step(step.init(jax.random.key(0)), data)


@pytest.mark.parametrize("count", [lambda p, b, rng: (rng is not None) * 64.0, lambda p, b, rng: p["w"].size * 1.0])
def test_a_count_may_depend_on_anything(count):
    """The forward pass is there once: a print prints once a micro-batch and replica, and real numbers."""
    seen = []

    def loss(params, batch, rng):
        total = squares(params, batch).sum()
        jax.debug.callback(lambda x: seen.append(float(x)), total)
        return jzero.Mean(total, count(params, batch, rng))

    model, data = Linear(loss), batch()
    _, metrics = one_step(model, data)
    jax.effects_barrier()
    assert len(seen) == 4 * 2
    assert np.isfinite(seen).all()
    total, gradient = jax.value_and_grad(lambda p: squares(p, data).sum() / (4 * 2 * 64))(model.init(jax.random.key(0)))
    assert float(metrics["loss"]) == pytest.approx(float(total), rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-6)


def test_an_integer_leaf_is_carried_along():
    order = jnp.arange(WIDTH, dtype=jnp.int32)[::-1]

    def loss(p, b, rng):
        return (squares(p, b) * p["order"].sum()).mean() + b["x"][:, p["order"]].mean()

    state, metrics = one_step(Linear(loss, order=order), batch())
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params["order"], order)


def test_parameters_that_are_one_array():
    """With an optimizer that wants the loss."""

    class Bare:
        def init(self, rng):
            return jax.random.normal(rng, (WIDTH, WIDTH))

        def loss(self, params, batch, rng):
            return squares({"w": params}, batch).mean()

    step = make(Bare(), optimizer=optax.chain(optax.adam(0.01), optax.contrib.reduce_on_plateau(patience=1)))
    assert step.state_shardings.opt_state[0][0].mu == step.state_shardings.params
    assert step.state_shardings.params.spec == jax.sharding.PartitionSpec("zero")
    state, metrics = step(step.init(jax.random.key(0)), batch())
    assert optax.tree.get(state.opt_state, "best_value") == pytest.approx(float(metrics["loss"]))


def test_where_nothing_counts_nothing_moves():
    step = make(Linear(lambda p, b, rng: jzero.Mean((squares(p, b) * 0).sum(), 0.0)))
    state = step.init(jax.random.key(0))
    before = jax.device_get(state.params)
    assert float(step.evaluate(state, batch())) == 0
    state, metrics = step(state, batch())
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    np.testing.assert_array_equal(state.params["w"], before["w"])


class Layers:
    def __init__(self, params):
        self.init = lambda rng: params

    def prefix(self, ends, batch, rng):
        return batch["x"]

    block = suffix = loss = prefix


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Linear(mean_square, phase=jnp.ones(3, jnp.complex64)), r"'phase' is complex64.*two real arrays"),
        (Layers({"ends": {}, "layers": {"w": jnp.ones((2, 8, 8))}}), r"'ends', 'stack'.*returned \['ends', 'layers'\]"),
        (Layers({"ends": {}, "stack": {"w": W, "v": jnp.ones((3, 8))}}), r"stack/v \(3,\).*stack/w \(2,\)"),
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
    refuses(lambda: make(Linear(lambda p, b, rng: output(squares(p, b).mean()))).lower(batch()), message)


def test_a_state_that_a_step_has_consumed_is_refused():
    step = make(Linear(mean_square))
    state = step.init(jax.random.key(0))
    step(state, batch())
    for call in (step, step.evaluate):
        refuses(lambda call=call: call(state, batch()), r"state, metrics = step\(state, batch\)")
