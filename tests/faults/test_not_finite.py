"""Losses and gradients that are not finite: skipped, and an end with the leaves' names."""

from itertools import product

import jax
import numpy as np
import pytest
from helpers.reference import LR, Layout, assert_bitwise, batches, initial, leaves, model
from helpers.sampling import keep

import jzero
from jzero.loss_scale import NonFiniteError

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 100, "warmup_type": "linear"}}
SCALED = {"enabled": True, "initial_scale_power": 3, "hysteresis": 2}


def spoiled(batch):
    images, labels = batch
    images = images.copy()
    images[-1, 0] = np.nan  # one pixel of one row of the last replica
    return images, labels


@pytest.mark.parametrize(("precision", "stage"), keep(product(["fp32", "bf16", "fp16"], [0, 3]), [("fp16", 3)]))
def test_a_step_that_is_not_finite_changes_nothing(precision, stage):
    layout = Layout(stage, 4, 2, precision=precision)
    more = {"fp16": SCALED} if precision == "fp16" else {}
    config = layout.config(scheduler=WARMUP, **more)
    step, data = jzero.make_train_step(model("mlp"), config, mesh=layout.mesh), batches("mlp")
    state = step.init(jax.random.key(0))
    rates, scales, skipped = [], [], []
    for i in range(6):
        bad = i in (2, 3)
        before = jax.device_get((state.params, state.opt_state)) if bad else None
        state, metrics = step(state, spoiled(data[i]) if bad else data[i])
        if bad:
            assert_bitwise(before, (state.params, state.opt_state))
            assert not np.isfinite(metrics["loss"])
        rates.append(float(metrics["lr"]))
        scales.append(float(metrics["loss_scale"]))
        skipped.append(bool(metrics["skipped"]))
    assert skipped == [False, False, True, True, False, False]
    assert int(state.loss_scale.skipped) == 2
    assert rates[2] == rates[3] == rates[4] < rates[5]  # the schedule counts the steps that were applied
    # The first overflow is tolerated (hysteresis 2), the second halves.
    assert scales == ([8, 8, 8, 8, 4, 4] if precision == "fp16" else [1] * 6)
    assert all(np.isfinite(x).all() for x in leaves(state.params))


def test_without_the_overflow_check_bf16_takes_what_comes():
    config = Layout(3, 4, 2).config(bf16={"enabled": True, "check_grad_overflow": False})
    step = jzero.make_train_step(model("mlp"), config, mesh=Layout(3, 4, 2).mesh)
    state, metrics = step(step.init(jax.random.key(0)), spoiled(batches("mlp")[0]))
    assert not metrics["skipped"]
    assert not np.isfinite(state.params["fc2"]["kernel"]).all()


@pytest.mark.parametrize("precision", keep(["fp32", "fp16"], ["fp32"]))
def test_a_run_that_is_stuck_ends_with_the_leaves_names(precision):
    config = Layout(3, 4, 2).config(**({"fp16": SCALED} if precision == "fp16" else {}))
    engine, *_ = jzero.initialize(model=model("mlp"), config=config, mesh=Layout(3, 4, 2).mesh)
    bad = spoiled(batches("mlp")[0])

    def run():
        for _ in range(40):
            engine.train_batch(bad)

    # fc1/bias is not among them: ReLU's gradient at NaN is 0.
    with pytest.raises(NonFiniteError, match=r"20 optimizer steps .*: fc1/kernel, fc2/bias, fc2/kernel\."):
        run()
    # The engine is whole: the state can be saved, the run can go on.
    assert engine.skipped_steps == engine.global_steps >= 20
    assert_bitwise(engine.state.params, initial("mlp"))
