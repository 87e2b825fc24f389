"""What a model may be and return: counts of every kind, odd leaves, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, settings

import jzero

ROWS, WIDTH = 16, 8
W = jnp.ones((2, WIDTH))


class Linear:
    """y = x w, with a loss of the test's choice and parameters beside w."""

    def __init__(self, loss, **more):
        self._loss, self.more = loss, more

    def init(self, rng):
        return {"w": jax.random.normal(rng, (WIDTH, WIDTH)), **self.more}

    def loss(self, params, batch, rng):
        return self._loss(params, batch, rng)


def squares(params, batch):
    return ((batch["x"] @ params["w"]).astype(jnp.float32) ** 2).sum(-1)


def batch(**more):
    return {"x": np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32), **more}


def make(model, optimizer=None, **more):
    config = settings(ROWS, 3, accum=2, lr=0.01, **more)
    return jzero.make_train_step(model, config, optimizer=optimizer, mesh=mesh())


def one_step(model, data, **more):
    step = make(model, **more)
    return step(step.init(jax.random.key(0)), data)


@pytest.mark.slow
def test_the_counts_of_the_batch_stay_in_float32():
    """80,000 is more than float16 holds, 2,002 needs more digits than bfloat16 has."""
    mask = np.full((ROWS, 1), 10_000, np.float32)
    mask[0] += 2
    model = Linear(lambda p, b, rng: jzero.Mean((squares(p, b) * b["mask"][:, 0]).sum(), b["mask"].sum()))
    _, wide = one_step(model, batch(mask=mask))
    for half in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 1}}):
        _, metrics = one_step(model, batch(mask=mask), **half)
        assert not metrics["skipped"]
        assert float(metrics["loss"]) == pytest.approx(float(wide["loss"]), rel=1e-2)
        assert float(metrics["grad_norm"]) == pytest.approx(float(wide["grad_norm"]), rel=2e-2)


@pytest.mark.parametrize("count", [lambda p, b, rng: (rng is not None) * 64.0, lambda p, b, rng: p["w"].size * 1.0])
def test_a_count_may_depend_on_anything(count):
    model = Linear(lambda p, b, rng: jzero.Mean(squares(p, b).sum(), count(p, b, rng)))
    data = batch()
    _, metrics = one_step(model, data)
    params = model.init(jax.random.key(0))
    total = float(squares(params, data).sum()) / (8 * 64)  # 4 replicas x 2 micro-batches
    assert float(metrics["loss"]) == pytest.approx(total, rel=1e-6)
    gradient = jax.grad(lambda p: squares(p, data).sum() / (8 * 64))(params)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-6)


def test_the_forward_pass_is_there_once():
    """A print in the loss prints once a micro-batch and replica, and real numbers."""
    seen = []

    def loss(params, batch, rng):
        total = squares(params, batch).sum()
        jax.debug.callback(lambda x: seen.append(float(x)), total)
        return jzero.Mean(total, 2.0)

    one_step(Linear(loss), batch())
    jax.effects_barrier()
    assert len(seen) == 8
    assert np.isfinite(seen).all()


def test_auto_cast_casts_the_floats_of_the_batch():
    kinds = []

    def loss(params, batch, rng):
        kinds.append(batch["x"].dtype)
        return squares(params, batch).mean()

    for on, dtype in ((False, jnp.float32), (True, jnp.float16)):
        one_step(Linear(loss), batch(), fp16={"enabled": True, "auto_cast": on})
        assert set(kinds) == {jnp.dtype(dtype)}
        kinds.clear()


@pytest.mark.parametrize("stage", keep([0, 1, 3], [3]))
def test_an_integer_leaf_is_carried_along(stage):
    order = jnp.arange(WIDTH, dtype=jnp.int32)[::-1]

    def loss(p, b, rng):
        return (squares(p, b) * p["order"].sum()).mean() + b["x"][:, p["order"]].mean()

    model = Linear(loss, order=order)
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    state, metrics = one_step(model, batch(), zero_optimization=section)
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params["order"], order)


def test_parameters_that_are_one_array():
    class Bare:
        def init(self, rng):
            return jax.random.normal(rng, (WIDTH, WIDTH))

        def loss(self, params, batch, rng):
            return squares({"w": params}, batch).mean()

    step = make(Bare(), optimizer=optax.adam(0.01))
    assert step.state_shardings.opt_state[0].mu == step.state_shardings.params
    assert step.state_shardings.params.spec == jax.sharding.PartitionSpec("zero")
    step(step.init(jax.random.key(0)), batch())


def test_an_optimizer_that_wants_the_loss():
    model = Linear(lambda p, b, rng: squares(p, b).mean())
    tx = optax.chain(optax.sgd(0.01), optax.contrib.reduce_on_plateau(patience=1))
    step = make(model, optimizer=tx)
    state, metrics = step(step.init(jax.random.key(0)), batch())
    assert optax.tree.get(state.opt_state, "best_value") == pytest.approx(float(metrics["loss"]))


def test_where_nothing_counts_nothing_moves():
    model = Linear(lambda p, b, rng: jzero.Mean((squares(p, b) * 0).sum(), 0.0))
    step = make(model)
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

    def block(self, layer, x, rng):
        return x @ layer["w"]

    def suffix(self, ends, x, batch, rng):
        return x.mean()

    def loss(self, params, batch, rng):
        raise NotImplementedError


COMPLEX = Linear(lambda p, b, rng: squares(p, b).mean(), phase=jnp.ones(3, jnp.complex64))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (COMPLEX, r"'phase' is complex64.*two real arrays"),
        (Layers({"ends": {}, "layers": {"w": jnp.ones((2, 8, 8))}}), r"'ends', 'stack'.*returned \['ends', 'layers'\]"),
        (Layers({"ends": {}, "stack": {"w": W, "v": jnp.ones((3, 8))}}), r"stack/v \(3,\).*stack/w \(2,\)"),
        (Layers({"ends": {}, "stack": {"w": W, "v": jnp.ones(())}}), "stack/v a scalar"),
    ],
)
def test_parameters_that_are_refused(model, message):
    refuses(lambda: make(model), message)


PAIR = r"a tuple of 2 values: return jzero.Mean\(sum, count\).*has_aux=True and return \(loss, {name: metric}\)"
SCALAR = r"it must be a scalar or jzero.Mean\(sum, count\)"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: (x, x), PAIR),
        (lambda x: (x, {"accuracy": x}), PAIR),
        (lambda x: (x, x, x), "a tuple of 3 values"),
        (lambda x: {"loss": x}, f"loss is a dict: {SCALAR}"),
        (lambda x: None, f"loss is a NoneType: {SCALAR}"),
        (lambda x: x[None], rf"loss has shape \(1,\): {SCALAR}"),
        (lambda x: jzero.Mean(x[None], 1), rf"loss has shape \(1,\): {SCALAR}"),
        (lambda x: x.astype(int), "loss is int32, which has no gradient: it must be a float"),
        (lambda x: x > 0, "loss is bool, which has no gradient"),
        (lambda x: 3, "loss is int32, which has no gradient"),
        (lambda x: jzero.Mean((x > 0).sum(), 4.0), "loss is int32, which has no gradient"),
        (lambda x: x * 1j, "loss is complex64: it must be real"),
        (lambda x: jzero.Mean(x, x * 1j), "loss is complex64: it must be real"),
    ],
)
def test_a_loss_with_other_outputs_is_refused(output, message):
    refuses(lambda: one_step(Linear(lambda p, b, rng: output(squares(p, b).mean())), batch()), message)


def test_a_state_that_a_step_has_consumed_is_refused():
    step = make(Linear(lambda p, b, rng: squares(p, b).mean()))
    state = step.init(jax.random.key(0))
    step(state, batch())
    for call in (step, step.evaluate):
        with pytest.raises(jzero.ConfigError, match=r"state, metrics = step\(state, batch\)"):
            call(state, batch())


def engine(width=WIDTH, optimizer="SGD"):
    class Wide(Linear):
        def init(self, rng):
            return {"w": jax.random.normal(rng, (width, WIDTH))}

    model = Wide(lambda p, b, rng: (p["w"] ** 2).mean() + 0 * b["x"].mean())
    config = {"train_batch_size": ROWS, "optimizer": {"type": optimizer, "params": {"lr": 0.01}}}
    return jzero.initialize(model=model, config=config)[0]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    first = engine()
    first.save_checkpoint(tmp_path)
    with pytest.raises(jzero.ConfigError, match=r"another model or optimizer: params/w is \(8, 8\), not \(16, 8\)"):
        engine(width=16).load_checkpoint(tmp_path)
    with pytest.raises(jzero.ConfigError, match=r"another model or optimizer: missing opt_state/.*mu/w"):
        engine(optimizer="Adam").load_checkpoint(tmp_path)
