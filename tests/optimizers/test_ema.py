"""The moving average of the weights. Oracle: optax.incremental_update after every step of a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.sampling import keep

import jzero

ROWS, DECAY = 16, 0.9
X = np.random.default_rng(0).normal(size=(5, ROWS, 4)).astype(np.float32)


def config(stage, **more):
    return {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "ema": {"decay": DECAY},
        **more,
    }


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - 1) ** 2)


def engine(stage, **more):
    model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss_fn)
    mesh = jzero.make_mesh(devices=jax.devices()[:4])
    return jzero.initialize(model=model, config=config(stage, **more), mesh=mesh)[0]


@pytest.mark.parametrize("stage", keep([0, 3], [3]))
def test_it_is_the_average_of_the_steps(stage, tmp_path):
    run = engine(stage, frozen_parameters=["bias"])
    params = ema = jax.device_get(run.state.params)
    for x in X:
        run.train_batch({"x": x})
        params = jax.device_get(run.state.params)
        ema = optax.incremental_update(params, ema, 1 - DECAY)
    averaged = run.step_fn.averaged(run.state)
    np.testing.assert_allclose(averaged.params["kernel"], ema["kernel"], rtol=1e-6)
    assert np.abs(ema["kernel"] - params["kernel"]).max() > 0.01
    assert averaged.params["kernel"].sharding == run.state.params["kernel"].sharding
    np.testing.assert_array_equal(averaged.params["bias"], params["bias"])
    plain = np.mean((X[0] @ ema["kernel"] + ema["bias"] - 1) ** 2)
    assert float(run.eval_batch({"x": X[0]}, ema=True)) == pytest.approx(float(plain), rel=1e-5)
    run.save_16bit_model(tmp_path, ema=True)
    loaded = jzero.weights.load(tmp_path, run.step_fn)
    np.testing.assert_array_equal(loaded["kernel"], np.asarray(averaged.params["kernel"]).astype(jnp.bfloat16))


def test_it_resumes_and_does_not_move_in_a_skipped_step(tmp_path):
    straight = engine(3)
    straight.train_batch({"x": X[0]})
    straight.save_checkpoint(tmp_path)
    resumed = engine(2)
    resumed.load_checkpoint(tmp_path)
    for run in (straight, resumed):
        run.train_batch({"x": X[1]})
    np.testing.assert_allclose(straight.state.opt_state.ema["kernel"], resumed.state.opt_state.ema["kernel"], rtol=1e-6)
    before = np.asarray(straight.state.opt_state.ema["kernel"])
    straight.train_batch({"x": np.full_like(X[0], np.nan)})
    np.testing.assert_array_equal(straight.state.opt_state.ema["kernel"], before)


def test_it_is_float32_beside_half_masters():
    run = engine(2, bf16={"enabled": True, "bf16_master_weights_and_grads": True}, fp16={})
    assert run.state.params["kernel"].dtype == jnp.bfloat16
    assert run.state.opt_state.ema["kernel"].dtype == jnp.float32


def test_without_the_section_it_is_an_error():
    run = engine(0, ema=None)
    with pytest.raises(jzero.ConfigError, match=r'add "ema": {"decay": 0.999}'):
        run.eval_batch({"x": X[0]}, ema=True)
    with pytest.raises(jzero.ConfigError, match=r"ema.decay = 1"):
        engine(0, ema={"decay": 1})
