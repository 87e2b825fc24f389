"""The moving average of the weights. Oracle: optax.incremental_update after every step of a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.refusals import refuses
from helpers.steps import mesh, settings

import jzero

ROWS, DECAY = 16, 0.9
X = np.random.default_rng(0).normal(size=(5, ROWS, 4)).astype(np.float32)


def engine(stage, **more):
    more = {"ema": {"decay": DECAY}, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, **more}
    model = jzero.from_flax(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2)
    )
    return jzero.initialize(model=model, config=settings(ROWS, stage, **more), mesh=mesh())[0]


def test_it_is_the_average_of_the_steps_and_resumes(tmp_path):
    run, resumed = (engine(stage, frozen_parameters=["bias"]) for stage in (3, 2))
    ema = jax.device_get(run.state.params)
    for i, x in enumerate(X):
        if i == len(X) - 1:
            run.save_checkpoint(tmp_path)
            resumed.load_checkpoint(tmp_path)
            resumed.train_batch({"x": x})
        run.train_batch({"x": x})
        params = jax.device_get(run.state.params)
        ema = optax.incremental_update(params, ema, 1 - DECAY)
    averaged = run.step_fn.averaged(run.state)
    kernel = np.asarray(averaged.params["kernel"])
    np.testing.assert_allclose(kernel, ema["kernel"], rtol=1e-6)
    np.testing.assert_allclose(resumed.state.opt_state.ema["kernel"], ema["kernel"], rtol=1e-6)
    assert np.abs(ema["kernel"] - params["kernel"]).max() > 0.01
    assert averaged.params["kernel"].sharding == run.state.params["kernel"].sharding
    np.testing.assert_array_equal(averaged.params["bias"], params["bias"])
    plain = np.mean((X[0] @ ema["kernel"] + ema["bias"] - 1) ** 2)
    assert float(run.eval_batch({"x": X[0]}, ema=True)) == pytest.approx(float(plain), rel=1e-5)
    run.save_16bit_model(tmp_path, ema=True)
    loaded = jzero.weights.load(tmp_path, run.step_fn)
    np.testing.assert_array_equal(loaded["kernel"], kernel.astype(jnp.bfloat16))
    run.train_batch({"x": np.full_like(X[0], np.nan)})  # skipped
    np.testing.assert_array_equal(run.state.opt_state.ema["kernel"], kernel)


def test_it_is_float32_beside_half_masters():
    run = engine(2, bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    assert run.state.params["kernel"].dtype == jnp.bfloat16
    assert run.state.opt_state.ema["kernel"].dtype == jnp.float32


def test_without_the_section_it_is_an_error():
    refuses(lambda: engine(0, ema=None).eval_batch({"x": X[0]}, ema=True), r'add "ema": {"decay": 0.999}')
    refuses(lambda: engine(0, ema={"decay": 1}), r"ema.decay = 1")
