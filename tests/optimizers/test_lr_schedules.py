"""DeepSpeed's schedules against a port of its scheduler objects in plain Python, called step by step.

Source of the port: deepspeed/runtime/lr_schedules.py of deepspeed 0.19.8 (`LRRangeTest` at line 313, `OneCycle` at 414,
`WarmupLR` at 703, `WarmupDecayLR` at 791, `WarmupCosineLR` at 842).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.config import Config
from jzero.errors import ConfigError
from jzero.optimizers import lr_schedules

STEPS = 60


def run(at_construction, at_call, steps=STEPS):
    """The values in force at steps 0, 1, 2, ...: one set at construction, then one set after every step."""
    values = [at_construction]
    for k in range(steps - 1):
        values.append(at_call(k))
    return values


def measured(curve, steps=STEPS):
    return np.asarray(jax.vmap(curve)(jnp.arange(steps, dtype=jnp.int32))).tolist()  # a program each would be compiled


def warmup(k, n, kind):
    n = max(2, n)
    if k >= n:
        return None
    return math.log(k + 1) / math.log(n) if kind == "log" else k / n


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("n", [1, 2, 10, 100])
def test_warmup_lr(kind, n):
    def at_call(k):
        gamma = warmup(k, n, kind)
        return 0.01 + (0.2 - 0.01) * (1.0 if gamma is None else gamma)

    params = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": n, "warmup_type": kind}
    got = measured(lr_schedules.make_lr_schedule("WarmupLR", params, 0.5).lr)
    assert got == pytest.approx(run(0.01, at_call), rel=2e-6)
    assert got[0] == got[1] == pytest.approx(0.01)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("n", "total"), [(10, 40), (1, 20), (1, 1), (20, 20)])
def test_warmup_decay_lr(kind, n, total):
    def at_call(k):
        gamma = warmup(k, n, kind)
        if gamma is None:
            gamma = max(0.0, (total - k) / max(1, total - max(2, n)))
        return 0.001 + (0.1 - 0.001) * gamma

    params = {"total_num_steps": total, "warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": n}
    schedule = lr_schedules.make_lr_schedule("WarmupDecayLR", {**params, "warmup_type": kind}, 0.1)
    assert measured(schedule.lr) == pytest.approx(run(0.001, at_call), rel=1e-5)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("n", "total", "start"), [(10, 40, 0.0), (5, 200, 0.1), (20, 20, 0.5)])
def test_warmup_cosine_lr(kind, n, total, start):
    def at_call(k):
        gamma = warmup(k, n, kind)
        if gamma is not None:
            return 0.3 * (start + (1 - start) * gamma)
        progress = min(1.0, (k - n + 1) / max(1, total - n))
        return 0.3 * (1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * progress)) / 2)

    params = {"total_num_steps": total, "warmup_num_steps": n, "warmup_min_ratio": start, "cos_min_ratio": 1e-3}
    schedule = lr_schedules.make_lr_schedule("WarmupCosineLR", {**params, "warmup_type": kind}, 0.3)
    assert measured(schedule.lr) == pytest.approx(run(0.0, at_call), rel=1e-5, abs=1e-7)


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 30), rate=st.floats(0.1, 5), staircase=st.booleans())
def test_lr_range_test(size, rate, staircase):
    def at_call(k):
        x = (k + 1) / size
        return 1e-3 * (1 + rate * (math.floor(x) if staircase else x))

    params = {"lr_range_test_step_size": size, "lr_range_test_step_rate": rate, "lr_range_test_staircase": staircase}
    schedule = lr_schedules.make_lr_schedule("LRRangeTest", params, 1.0)
    assert measured(schedule.lr) == pytest.approx(run(1e-3, at_call), rel=1e-6)


@settings(deadline=None, max_examples=20)
@given(
    up=st.integers(1, 20),
    down=st.none() | st.integers(1, 20),
    stairs=st.integers(0, 5),
    more_stairs=st.none() | st.integers(0, 5),
    decay_step=st.integers(0, 7),
    decay_lr=st.sampled_from([0.0, 0.5]),
    decay_mom=st.sampled_from([0.0, 0.01]),
)
def test_one_cycle(up, down, stairs, more_stairs, decay_step, decay_lr, decay_mom):
    second = up if down is None else down
    second_stairs = stairs if more_stairs is None else more_stairs
    total = up + second

    def height(k):
        i = k + 1
        if i <= up:
            return i * stairs // up / stairs if stairs else i / up
        return (total - i) * second_stairs // second / second_stairs if second_stairs else (total - i) / second

    def growth(k, rate):
        return 1 + rate * (k - total + 1) / decay_step if decay_step else 1

    def lr(k):
        return 0.1 + (1.0 - 0.1) * height(k) if k < total else 0.1 / growth(k, decay_lr)

    def momentum(k):
        return 0.95 - (0.95 - 0.7) * height(k) if k < total else 0.95 * growth(k, decay_mom)

    params = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 1.0,
        "decay_lr_rate": decay_lr,
        "cycle_first_step_size": up,
        "cycle_second_step_size": down,
        "cycle_first_stair_count": stairs,
        "cycle_second_stair_count": more_stairs,
        "decay_step_size": decay_step,
        "cycle_min_mom": 0.7,
        "cycle_max_mom": 0.95,
        "decay_mom_rate": decay_mom,
    }
    schedule = lr_schedules.make_lr_schedule("OneCycle", params, 1.0)
    assert measured(schedule.lr) == pytest.approx(run(0.1, lr), rel=1e-5)
    assert measured(schedule.momentum) == pytest.approx(run(0.7, momentum), rel=1e-5)


def test_one_cycle_without_momentum():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False}
    assert lr_schedules.make_lr_schedule("OneCycle", params, 1.0).momentum is None


LEFT_OUT = object()


@pytest.mark.parametrize("given", [LEFT_OUT, None, "auto"])
@pytest.mark.parametrize("type", ["WarmupLR", "WarmupDecayLR"])
def test_the_peak_of_a_warm_up_that_does_not_give_one(type, given):
    """lr_schedules.py, lines 728 and 738: no maximum, or null, is the optimizer's rate; WarmupDecayLR's line 818 has
    the default 0.001 instead, and hands a null on to WarmupLR. "auto" is not DeepSpeed's: the Hugging Face Trainer
    replaces it with its learning rate, which is the optimizer's too.
    """
    lr, n, total = 3e-5, 10, 40
    peak = 0.001 if type == "WarmupDecayLR" and given is LEFT_OUT else lr

    def at_call(k):
        gamma = warmup(k, n, "log")
        if gamma is None:
            gamma = max(0.0, (total - k) / (total - n)) if type == "WarmupDecayLR" else 1.0
        return peak * gamma

    params = {"warmup_num_steps": n} | ({"total_num_steps": total} if type == "WarmupDecayLR" else {})
    scheduler = {"type": type, "params": params | ({} if given is LEFT_OUT else {"warmup_max_lr": given})}
    expected = pytest.approx(run(0.0, at_call), rel=2e-6, abs=1e-12)
    assert measured(lr_schedules.make_lr_schedule(type, scheduler["params"], lr).lr) == expected
    config = Config.load({"scheduler": scheduler})
    assert measured(lr_schedules.from_config(config.scheduler, lr).lr) == expected
    assert config.autos == (("scheduler.params.warmup_max_lr",) if given == "auto" else ())


def test_auto_for_a_parameter_that_the_schedule_does_not_have():
    params = {"total_num_steps": 40, "warmup_num_steps": 10, "warmup_max_lr": "auto"}
    assert float(lr_schedules.make_lr_schedule("WarmupCosineLR", params, 0.25).lr(1)) == 0.0
    params = {"value": 0.5, "warmup_max_lr": "auto"}
    assert float(lr_schedules.make_lr_schedule("constant_schedule", params, 1.0).lr(1)) == 0.5


def test_the_peak_is_reported_where_it_may_surprise():
    for none in ({}, {"warmup_max_lr": None}, {"warmup_max_lr": "auto"}):
        note = lr_schedules.make_lr_schedule("WarmupLR", none, 0.25).notes[1]
        assert note == "WarmupLR: the rate warms up to the optimizer's lr 0.25; warmup_max_lr has no other"
    assert len(lr_schedules.make_lr_schedule("WarmupLR", {"warmup_max_lr": 0.25}, 0.25).notes) == 1
    overriding = lr_schedules.make_lr_schedule("WarmupLR", {"warmup_max_lr": 0.5}, 0.25)
    assert "0.5 overrides the optimizer's lr 0.25" in overriding.notes[1]
    decay = lr_schedules.make_lr_schedule("WarmupDecayLR", {"total_num_steps": 1000}, 0.25)
    assert "0.001 overrides the optimizer's lr 0.25" in decay.notes[1]


def test_constant_without_a_scheduler():
    schedule = lr_schedules.make_lr_schedule(None, {}, 0.125)
    assert float(jax.jit(schedule.lr)(7)) == 0.125
    assert schedule.notes == ()
    assert schedule.lr(0).dtype == jnp.float32
    assert lr_schedules.from_config(None, None) is None


def test_whole_numbers_may_be_written_as_floats():
    as_float, as_int = (
        lr_schedules.make_lr_schedule("WarmupLR", {"warmup_num_steps": n, "warmup_type": "linear"}, 0.001)
        for n in (1e1, 10)
    )
    assert measured(as_float.lr, 20) == measured(as_int.lr, 20)


def test_every_optax_schedule_but_the_one_that_takes_functions():
    offered = {name for name in dir(optax) if name.endswith(("_schedule", "_schedules", "exponential_decay"))}
    assert offered - {"scale_by_schedule"} == {*lr_schedules.OPTAX_SCHEDULES, "join_schedules"}


def test_optax_schedules_have_optax_indexing():
    params = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 5, "decay_steps": 50}
    schedule = lr_schedules.make_lr_schedule("warmup_cosine_decay_schedule", params, 1e-3)
    reference = optax.warmup_cosine_decay_schedule(**params)
    assert measured(schedule.lr) == pytest.approx([float(reference(n)) for n in range(STEPS)], rel=1e-5, abs=1e-7)
    steps = lr_schedules.make_lr_schedule(
        "piecewise_constant_schedule", {"init_value": 1.0, "boundaries_and_scales": {"3": 0.5}}, 1e-3
    )
    assert measured(steps.lr, 5) == [1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("type", "params", "words"),
    [
        ("WarmupLr", {}, ["scheduler.type: 'WarmupLr'", "did you mean 'WarmupLR'", "or one of optax's"]),
        ("StepLR", {}, ["scheduler.type: 'StepLR'", "Use WarmupLR, WarmupDecayLR"]),
        ("WarmupLR", {"warmup_num_step": 3}, ["scheduler.params.warmup_num_step", "(value 3)", "'warmup_num_steps'"]),
        ("WarmupLR", {"warmup_num_steps": -1}, ["warmup_num_steps: -1", "a non-negative integer"]),
        ("WarmupLR", {"warmup_type": "cubic"}, ["'cubic'", '"log" or "linear"']),
        ("WarmupLR", {"warmup_max_lr": "1e-3"}, ["'1e-3'", "a number >= 0"]),
        ("WarmupLR", {"last_batch_iteration": 5}, ["last_batch_iteration: 5", "checkpoint"]),
        ("WarmupDecayLR", {}, ["total_num_steps: missing"]),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, ['total_num_steps = "auto"', "pass total_num_steps="]),
        *(
            (
                type,
                {"total_num_steps": 100, **given},
                [f"warmup_num_steps = {n} and total_num_steps = 100: "],
            )
            for type in ("WarmupDecayLR", "WarmupCosineLR")
            for given, n in (({"warmup_num_steps": 101}, 101), ({}, 1000))
        ),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max": 1}, ["cycle_max_lr: missing", "did you mean 'cycle_max_lr'"]),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_stair_count": 2**30}, ["too many"]),
        ("OneCycle", {"cycle_min_lr": 1e39, "cycle_max_lr": 1.0}, ["cycle_min_lr: 1e+39", "float32's range"]),
        ("join_schedules", {}, ["scheduler.type: 'join_schedules' is unknown"]),
        ("piecewise_constant_schedule", {"init_value": 1.0, "boundaries_and_scales": {"x": 1}}, ["refuses", "'x'"]),
        ("cosine_decay_schedule", {"init_value": 1.0}, ["decay_steps: missing"]),
        ("cosine_decay_schedule", {"init_value": 1.0, "decay_steps": -1}, ["optax.cosine_decay_schedule refuses"]),
        ("cosine_decay_schedule", {"init_value": 1.0, "decay_step": 9}, ["did you mean 'decay_steps'"]),
    ],
)
def test_errors(type, params, words):
    with pytest.raises(ConfigError) as error:
        lr_schedules.make_lr_schedule(type, params, 1e-3)
    for word in words:
        assert word in str(error.value)
