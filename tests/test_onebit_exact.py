"""1-bit Adam, 0/1 Adam and 1-bit LAMB with exact communication, beside NumPy ports of DeepSpeed 0.19.6.

The ports are of runtime/fp16/onebit/{adam,zoadam,lamb}.py without their first step, which only sets up buffers, and
with an average in place of `compressed_allreduce`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.onebit import EXACT, HYPER
from helpers.optimizers import config, train
from helpers.reference import Layout, batches, model
from helpers.sampling import sample

import jzero
from jzero import optimizers
from jzero.optimizers.lr_schedules import LRSchedule

LR, STEPS = 0.125, 40


def series(shape=(8, 16), scale=1.0):
    w, *grads = (np.random.default_rng([3, i]).normal(size=shape) for i in range(STEPS + 1))
    return scale * w, [g * 10 ** -(i / STEPS) for i, g in enumerate(grads)]  # ever smaller, so the variance shrinks


def trained(name, params, w, grads, stacked=None):
    with jax.enable_x64(True):
        tx = optimizers.make_optimizer(
            config(name, {**HYPER, **EXACT, **params}), LRSchedule(lambda count: LR), stacked=stacked
        )
        return np.asarray(train(tx, jnp.asarray(w), [jnp.asarray(g) for g in grads])[0])


@pytest.mark.parametrize("freeze", [1, 5, 1000])
def test_one_bit_adam_is_deepspeeds(freeze):
    w, grads = series()
    expected, m, v = w, 0.0, 0.0
    for step, g in enumerate(grads, start=1):
        m = 0.8 * m + 0.2 * g
        if step <= freeze:
            v = 0.95 * v + 0.05 * g * g
        expected = expected - LR * (m / (np.sqrt(v) + 1e-6) + 0.1 * expected)
    found = trained("OneBitAdam", {"freeze_step": freeze}, w, grads)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("freeze", "scaler"), [(1000, 3), (12, 2), (1000, 16), (30, 1)])
def test_zero_one_adam_is_deepspeeds(freeze, scaler):
    w, grads = series()
    expected, m, v = w, 0.0, 0.0
    interval, counter = 1, 0
    for step, g in enumerate(grads, start=1):
        if step <= freeze and step % interval == 0:
            v = 0.95 * v + 0.05 * g * g
        m = 0.8 * m + 0.2 * g
        expected = expected - LR * (m / (np.sqrt(v) + 1e-6) + 0.1 * expected)
        if step <= freeze and step % interval == 0:
            counter += 1
            if counter == scaler:
                counter, interval = 0, 2 * interval
    found = trained("ZeroOneAdam", {"var_freeze_step": freeze, "var_update_scaler": scaler}, w, grads)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


def lamb_reference(w, grads, freeze, decay, low, high, beta=0.7, most=3.0, least=0.6, threshold=0.05):
    m = v = fresh = ratio_average = 0.0
    last = 1.0
    for step, g in enumerate(grads, start=1):
        before = m
        m = 0.8 * m + 0.2 * g
        if step <= freeze:
            v = 0.95 * v + 0.05 * g * g
            fresh = v
            update = m / (np.sqrt(v) + 1e-6) + decay * w
            w_norm, u_norm = np.linalg.norm(w), np.linalg.norm(update)
            coeff = min(max(w_norm / u_norm, low), high) if w_norm != 0 and u_norm != 0 else 1.0
            if coeff != 1.0:
                ratio_average = beta * ratio_average + (1 - beta) * coeff
        else:
            again = (m - before * 0.8) / (1 - 0.8)
            fresh = 0.95 * fresh + 0.05 * again * again
            size, real = np.sqrt(v) + 1e-6, np.sqrt(fresh) + 1e-6
            plain = m / size
            update, factor = plain, (size / real).max()
            if decay > 0:
                update = plain + decay * w
                part = min(1.0, np.linalg.norm(plain) / np.linalg.norm(update))
                factor = factor * part + (1.0 - part)
            factor = min(max(factor, least), most)
            factor = min(max(factor, last * (1 - threshold)), last * (1 + threshold))
            last = factor
            coeff = ratio_average * factor
        w = w - LR * coeff * update
    return w, last


LAMB = [(10, 0.1, 1.0), (10, 0.0, 1.0), (1, 0.1, 1e3), (1000, 0.1, 1.0), (10, 0.1, 0.0)]


@pytest.mark.parametrize(
    ("stacked", "freeze", "decay", "scale"), sample([(s, *x) for x in LAMB for s in (False, True)], strength=1)
)
def test_one_bit_lamb_is_deepspeeds(freeze, decay, scale, stacked):
    params = {
        "freeze_step": freeze, "weight_decay": decay, "max_coeff": 0.9, "min_coeff": 0.05, "coeff_beta": 0.7,
        "factor_max": 3.0, "factor_min": 0.6, "factor_threshold": 0.05,
    }  # fmt: skip
    w, grads = series((2, 8, 16), scale)
    if stacked:
        found = trained("OneBitLamb", params, w, grads, stacked=True)
        for layer in range(2):
            expected, _ = lamb_reference(w[layer], [g[layer] for g in grads], freeze, decay, 0.05, 0.9)
            np.testing.assert_allclose(found[layer], expected, rtol=1e-10, atol=1e-10)
        return
    expected, last = lamb_reference(w, grads, freeze, decay, 0.05, 0.9)
    np.testing.assert_allclose(trained("OneBitLamb", params, w, grads), expected, rtol=1e-10, atol=1e-10)
    assert (last != 1) == (freeze < STEPS)


def test_a_transport_is_one_of_deepspeeds():
    with pytest.raises(jzero.ConfigError, match="comm_backend_name: 'gloo' must be "):
        jzero.Config.load({"optimizer": {"type": "ZeroOneAdam", "params": {"comm_backend_name": "gloo"}}})


def test_the_report_names_the_fallback_and_training_works():
    params = {"lr": 1e-3, "freeze_step": 2, "bias_correction": False, "cuda_aware": True, "comm_backend_name": "mpi"}
    step = jzero.make_train_step(
        model("decoder"),
        Layout(1, 8, 1, unroll=False).config(optimizer={"type": "OneBitLamb", "params": {**params, **EXACT}}),
        mesh=Layout(1, 8, 1).mesh,
    )
    text = " ".join(jzero.report(step).split())
    assert "OneBitLamb: exact_communication is true: gradients are averaged exactly, not as signs" in text
    state = step.init(jax.random.key(0))
    for batch in batches("decoder")[:3]:
        state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"]))
