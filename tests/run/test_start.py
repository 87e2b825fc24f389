"""Starting from values that exist, and gradients alone. Oracle: jax.grad of the plain loss on one device."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.drawn import drawn
from helpers.plain_flax import Normed
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, settings, started_with_numpy

import jzero
from jzero.tree import named

ROWS = 16
KEY = jax.random.key(5)
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
        state = step.init(KEY)
        for name, x in named(state.params).items():
            np.testing.assert_array_equal(x, values[name.removeprefix("ends/")])
        step(state, BATCH)  # deletes the state's buffers, not the module's
        assert all(np.isfinite(x[...]).all() for x in values.values())


class Outer(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="params")(x)


def test_a_run_starts_from_params_of_every_kind():
    module, deep = nnx.Linear(4, 4, rngs=nnx.Rngs(5)), Deep(nnx.Rngs(5))
    variables, nested = (drawn(jax.eval_shape(one.init, KEY, X)) for one in (linen.Dense(4), Outer()))
    models = {
        jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss_fn): {
            "state": nnx.state(module), "module": module,
        },
        jzero.from_flax(Deep): {"stack": nnx.state(deep), "pure stack": nnx.to_pure_dict(nnx.state(deep))},
        jzero.from_flax(linen.Dense(4), loss_fn, example_batch=BATCH): {
            "variables": variables, "params": variables["params"],
        },
        jzero.from_flax(Outer(), loss_fn, example_batch=BATCH): {
            "variables of a submodule named params": nested, "a submodule named params": nested["params"],
        },
    }  # fmt: skip
    kernels = [module.kernel, deep.first.kernel, variables["params"]["kernel"], nested["params"]["params"]["kernel"]]
    for (model, starts), kernel in zip(models.items(), kernels, strict=True):
        step = jzero.make_train_step(model, config(3), mesh=mesh())
        for kind, params in starts.items():
            found = named(step.init(KEY, params).params)
            mine = next(x for name, x in found.items() if name.endswith("kernel") and "stack" not in name)
            np.testing.assert_array_equal(mine, kernel[...], err_msg=kind)
    other = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    refuses(lambda: jzero.initialize(model=jzero.from_flax(Deep), config=config(), params=other, mesh=mesh()),
            "the params are another model's")  # fmt: skip


@pytest.mark.parametrize(("stage", "pipe"), keep([(0, 1), (3, 1), (2, 2)], [(2, 2)]))
def test_gradients_are_those_of_one_device(stage, pipe):
    more = {"frozen_parameters": ["first/bias"], "gradient_clipping": 1e-3}
    step, state = started_with_numpy(jzero.from_flax(Deep), config(stage, **more), mesh=mesh(pipe=pipe))
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
    assert float(metrics["grad_norm"]) == pytest.approx(
        np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(jax.device_get(expected)))), rel=1e-5
    )
    there = jax.tree.map(lambda p: p + 0.1, params)
    up = jax.device_put(there, step.state_shardings.params)
    found = step.gradients(dataclasses.replace(state, params=up), BATCH)[0]["ends"]["first"]["kernel"]
    expected = gradient_of(there, BATCH)[1]["ends"]["first"]["kernel"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # at any parameters


def test_gradients_have_their_true_scale_under_fp16():
    model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss_fn)
    step, state = started_with_numpy(model, config(fp16={"enabled": True, "auto_cast": True}), mesh=mesh())
    gradients, _ = step.gradients(state, BATCH)
    params = jax.device_get(state.params)
    expected = 2 * X.T @ (X @ params["kernel"] + params["bias"] - BATCH["y"]) / BATCH["y"].size
    np.testing.assert_allclose(gradients["kernel"], expected, rtol=2e-2, atol=2e-3)


def test_gradients_may_return_the_state_that_moved():
    batch = {"x": np.tile(X, 2)[:, :6], "y": X[:, :3]}
    step, state = started_with_numpy(jzero.from_flax(Normed, loss_fn), config(3), mesh=mesh())
    start = jax.device_get(state.params["norm"])
    gradients, _, moved = step.gradients(state, batch, new_state=True)
    assert gradients["norm"]["mean"] is None
    assert moved.params["last"]["kernel"] is state.params["last"]["kernel"]
    for like, x in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        assert (like.shape, like.dtype, like.sharding) == (x.shape, x.dtype, x.sharding)
    after, _ = step(state, batch)
    for name in ("mean", "var"):
        np.testing.assert_allclose(moved.params["norm"][name], after.params["norm"][name], rtol=1e-6)
        assert not np.allclose(moved.params["norm"][name], start[name])
