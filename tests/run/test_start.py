"""Starting from values that exist, and gradients alone. Oracle: jax.grad of the plain loss on one device."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.sampling import keep
from helpers.steps import mesh, settings, started

import jzero
from jzero.tree import named

ROWS = 16
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
BATCH = {"x": X, "y": np.roll(X, 1, axis=1)}


config = partial(settings, ROWS, accum=2)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(rngs.fork(split=2))

    def prefix(self, batch):
        return self.first(batch["x"])

    def suffix(self, x, batch):
        return jnp.mean((x - batch["y"]) ** 2)


def plain(params, batch):
    x = batch["x"] @ params["ends"]["first"]["kernel"] + params["ends"]["first"]["bias"]
    for i in range(2):
        x = x @ params["stack"]["kernel"][i] + params["stack"]["bias"][i]
    return jnp.mean((x - batch["y"]) ** 2)


gradient_of = jax.jit(jax.value_and_grad(plain))


@pytest.mark.slow
def test_a_built_module_starts_from_its_values():
    for built, stage in (nnx.Linear(4, 4, rngs=nnx.Rngs(5)), 0), (Deep(nnx.Rngs(5)), 3):
        model = jzero.from_flax(built, None if isinstance(built, Deep) else loss_fn)
        step = jzero.make_train_step(model, config(stage), mesh=mesh())
        values = named(nnx.to_pure_dict(nnx.state(built, nnx.Param)))
        state = step.init(jax.random.key(0))
        for name, x in named(state.params).items():
            np.testing.assert_array_equal(x, values[name.removeprefix("ends/")])
        step(state, BATCH)  # deletes the state's buffers, not the module's
        assert all(np.isfinite(x[...]).all() for x in values.values())


class Outer(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="params")(x)


@pytest.fixture(scope="module")
def starts():
    """The values of a module in every form in which they may start a run; the model; a kernel among them."""
    module, deep = nnx.Linear(4, 4, rngs=nnx.Rngs(5)), Deep(nnx.Rngs(5))
    flat = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss_fn)
    stacked = jzero.from_flax(Deep)
    bound, nested = (jzero.from_flax(m, loss_fn, example_batch=BATCH) for m in (linen.Dense(4), Outer()))
    variables, named_params = (m.init(jax.random.key(5), X) for m in (linen.Dense(4), Outer()))
    step = {m: jzero.make_train_step(m, config(3), mesh=mesh()) for m in (flat, stacked, bound, nested)}
    inner = named_params["params"]
    return {
        "state": (step[flat], nnx.state(module), module.kernel[...]),
        "module": (step[flat], module, module.kernel[...]),
        "dict": (step[flat], nnx.to_pure_dict(nnx.state(module)), module.kernel[...]),
        "stack": (step[stacked], nnx.state(deep), deep.first.kernel[...]),
        "pure stack": (step[stacked], nnx.to_pure_dict(nnx.state(deep)), deep.first.kernel[...]),
        "variables": (step[bound], variables, variables["params"]["kernel"]),
        "params": (step[bound], variables["params"], variables["params"]["kernel"]),
        "variables of a submodule named params": (step[nested], named_params, inner["params"]["kernel"]),
        "a submodule named params": (step[nested], inner, inner["params"]["kernel"]),
    }


def test_a_run_starts_from_params_of_every_kind(starts):
    for kind, (step, params, kernel) in starts.items():
        found = named(step.init(jax.random.key(0), params).params)
        mine = next(x for name, x in found.items() if name.endswith("kernel") and "stack" not in name)
        np.testing.assert_array_equal(mine, kernel, err_msg=kind)


def test_params_of_another_model_are_refused():
    other = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(jzero.ConfigError, match="the params are another model's"):
        jzero.initialize(model=jzero.from_flax(Deep), config=config(), params=other, mesh=mesh())


@pytest.mark.parametrize(("stage", "pipe"), keep([(0, 1), (3, 1), (2, 2)], [(2, 2)]))
def test_gradients_are_those_of_one_device(stage, pipe):
    more = {"frozen_parameters": ["first/bias"], "gradient_clipping": 1e-3}
    step, state = started(jzero.from_flax(Deep), config(stage, **more), mesh=mesh(pipe=pipe))
    params = jax.device_get(state.params)
    gradients, metrics = step.gradients(state, BATCH)
    value, expected = gradient_of(params, BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    assert gradients["ends"]["first"]["bias"] is None
    del expected["ends"]["first"]["bias"]
    shardings = named(step.state_shardings.params)
    for name, x in named(gradients).items():
        np.testing.assert_allclose(x, named(expected)[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert x.sharding == shardings[name]
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)
    _, stepped = step(state, BATCH)  # the state is still alive
    assert float(stepped["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)


def test_gradients_have_their_true_scale_under_fp16():
    model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss_fn)
    step, state = started(model, config(fp16={"enabled": True, "auto_cast": True}), mesh=mesh())
    gradients, _ = step.gradients(state, BATCH)
    params = jax.device_get(state.params)
    expected = jax.grad(lambda p: jnp.mean((X @ p["kernel"] + p["bias"] - BATCH["y"]) ** 2))(params)
    np.testing.assert_allclose(gradients["kernel"], expected["kernel"], rtol=2e-2, atol=2e-3)


def test_an_update_rule_of_ones_own():
    """Sharpness-aware minimisation (Foret et al., arXiv:2010.01412) by hand, as one device computes it."""
    step = jzero.make_train_step(jzero.from_flax(Deep), config(3), mesh=mesh())
    state, losses, expected = step.init(jax.random.key(0)), [], []
    params = jax.device_get(state.params)
    for _ in range(3):
        gradients, metrics = step.gradients(state, BATCH)
        up = 0.05 / metrics["grad_norm"]
        high = dataclasses.replace(state, params=jax.tree.map(lambda p, g, up=up: p + up * g, state.params, gradients))
        gradients, _ = step.gradients(high, BATCH)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradients)
        state = dataclasses.replace(state, params=new, step=state.step + 1)
        losses.append(float(metrics["loss"]))
        value, g = gradient_of(params, BATCH)
        up = 0.05 / optax.tree.norm(g)
        high = jax.tree.map(lambda p, g, up=up: p + up * g, params, g)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient_of(high, BATCH)[1])
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_parameters_may_be_numbers():
    class Scale:
        def init(self, rng):
            return {"w": jnp.zeros(())}

        def loss(self, params, batch, rng):
            return jnp.mean(params["w"] * batch["x"])

    step = jzero.make_train_step(Scale(), config(), mesh=mesh())
    state = step.init(jax.random.key(0), {"w": 2})
    assert state.params["w"].dtype == jnp.float32
    assert float(step.evaluate(state, BATCH)) == pytest.approx(2 * X.mean(), rel=1e-5)


def test_gradients_may_return_the_state_that_moved():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.last = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(x))

    step, state = started(jzero.from_flax(Net, loss_fn), config(3), mesh=mesh())
    gradients, _, moved = step.gradients(state, BATCH, new_state=True)
    assert gradients["norm"]["mean"] is None
    assert moved.params["last"]["kernel"] is state.params["last"]["kernel"]
    for like, x in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        assert (like.shape, like.dtype, like.sharding) == (x.shape, x.dtype, x.sharding)
    after, _ = step(state, BATCH)
    for name in ("mean", "var"):
        np.testing.assert_allclose(moved.params["norm"][name], after.params["norm"][name], rtol=1e-6)
        assert not np.allclose(moved.params["norm"][name], [0, 1][name == "var"])
