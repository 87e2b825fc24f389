"""Optimizers and schedules that the caller passes to initialize."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import assert_same, build, rows


def sgd_steps(rates):
    """The parameters after SGD at these rates, through the config's optimizer."""
    e, *_ = build(0, optimizer=lambda lr: optax.sgd(lr), lr_scheduler=lambda count: jnp.asarray(rates)[count])
    for seed in range(len(rates)):
        e.train_batch(rows(seed))
    return e.state.params


@pytest.mark.slow
def test_client_optimizers():
    expected = sgd_steps([0.1, 0.1])
    e, tx, _, schedule = build(3, optimizer=(own := optax.sgd(0.1)))
    assert tx is own
    assert schedule is None
    assert np.isnan(e.get_lr()[0])
    injected, _, _, none = build(3, optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    assert none is None
    assert injected.get_lr() == pytest.approx([0.1])
    for seed in range(2):
        e.train_batch(rows(seed))
        injected.train_batch(rows(seed))
    for params in (e.state.params, injected.state.params):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, expected)


@pytest.mark.slow
def test_an_optimizer_of_the_schedule_and_a_scheduler():
    e, _, _, schedule = build(3, optimizer=lambda lr: optax.sgd(lr), lr_scheduler=lambda count: 0.1 * (count + 1))
    assert [float(schedule(n)) for n in (0, 4)] == pytest.approx([0.1, 0.5])
    rates = []
    for seed in range(2):
        rates += e.get_lr()
        e.train_batch(rows(seed))
    assert rates == pytest.approx([0.1, 0.2])
    expected = sgd_steps([0.1, 0.2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), e.state.params, expected)


def test_a_scheduler_for_the_configs_optimizer():
    e, *_ = build(lr_scheduler=optax.linear_schedule(0.0, 1.0, 10))
    before = jax.device_get(e.state.params)
    e.train_batch(rows(0))
    assert_same(e.state.params, before)  # the rate is 0
    assert e.get_lr() == pytest.approx([0.1])
