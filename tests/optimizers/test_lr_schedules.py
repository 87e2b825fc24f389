"""DeepSpeed's schedules against a port of deepspeed 0.19.8's runtime/lr_schedules.py in Python, step by step."""

import math

import jax
import numpy as np
import optax
import pytest
from helpers.refusals import says

from jzero.config import Config
from jzero.optimizers import lr_schedules
from jzero.optimizers.lr_schedules import make_lr_schedule

STEPS = 60


def measured(curve, steps=STEPS):
    return np.asarray(jax.jit(jax.vmap(curve))(np.arange(steps, dtype=np.int32))).tolist()  # one program for all


def check(curve, at_construction, at_call, **tolerance):
    """One value is set at construction, then one after every step."""
    expected = [at_construction, *map(at_call, range(STEPS - 1))]
    assert measured(curve) == pytest.approx(expected, **tolerance)


FLOOR = 1e-3


@pytest.mark.parametrize(
    ("type", "kind", "n", "total", "low"),
    [
        ("WarmupLR", "log", 10, None, 0.01),
        ("WarmupLR", "log", 1, None, 0.01),
        ("WarmupLR", "linear", 100, None, 0.01),
        ("WarmupDecayLR", "log", 10, 40, 0.001),
        ("WarmupDecayLR", "linear", 1, 1, 0.001),
        ("WarmupCosineLR", "log", 10, 40, 0.0),
        ("WarmupCosineLR", "linear", 20, 20, 0.5),
    ],
)
def test_warm_ups(type, kind, n, total, low):
    high, least = 0.3, max(2, n)

    def after(k):
        if type == "WarmupCosineLR":
            progress = min(1.0, (k - n + 1) / max(1, total - n))
            return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        gamma = max(0.0, (total - k) / max(1, total - least)) if total else 1.0
        return (low + (high - low) * gamma) / high

    def at_call(k):
        if k >= least:
            return high * after(k)
        gamma = math.log(k + 1) / math.log(least) if kind == "log" else k / least
        return high * (low + (1 - low) * gamma) if cosine else low + (high - low) * gamma

    cosine = type == "WarmupCosineLR"  # its bounds are shares of the optimizer's rate
    ratios = {"warmup_min_ratio": low, "cos_min_ratio": FLOOR, "warmup_max_lr": "auto"}  # of this one it has no such
    bounds = ratios if cosine else {"warmup_min_lr": low}
    params = bounds | {"warmup_num_steps": n, "warmup_type": kind} | ({"total_num_steps": total} if total else {})
    schedule = make_lr_schedule(type, params if cosine else {**params, "warmup_max_lr": high}, high if cosine else 0.5)
    check(schedule.lr, 0.0 if cosine else low, at_call, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("size", "rate", "staircase"), [(1, 0.5, False), (7, 2.0, True), (30, 5.0, False)])
def test_lr_range_test(size, rate, staircase):
    def at_call(k):
        x = (k + 1) / size
        return 1e-3 * (1 + rate * (math.floor(x) if staircase else x))

    params = {"lr_range_test_step_size": size, "lr_range_test_step_rate": rate, "lr_range_test_staircase": staircase}
    check(make_lr_schedule("LRRangeTest", params, 1.0).lr, 1e-3, at_call, rel=1e-6)


@pytest.mark.parametrize(
    ("up", "down", "stairs", "more_stairs", "decay_step"),
    [(5, None, 0, None, 0), (20, 7, 5, 0, 3), (4, 9, 0, 2, 7), (13, None, 4, None, 2)],
)
def test_one_cycle(up, down, stairs, more_stairs, decay_step):
    second = up if down is None else down
    second_stairs = stairs if more_stairs is None else more_stairs
    total, decay_lr, decay_mom = up + second, 0.5, 0.01

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
        "cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "decay_lr_rate": decay_lr, "cycle_first_step_size": up,
        "cycle_second_step_size": down, "cycle_first_stair_count": stairs, "cycle_second_stair_count": more_stairs,
        "decay_step_size": decay_step, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95, "decay_mom_rate": decay_mom,
    }  # fmt: skip
    schedule = make_lr_schedule("OneCycle", params, 1.0)
    check(schedule.lr, 0.1, lr, rel=1e-5)
    check(schedule.momentum, 0.7, momentum, rel=1e-5)
    assert make_lr_schedule("OneCycle", {**params, "cycle_momentum": False}, 1.0).momentum is None


LEFT_OUT = object()


@pytest.mark.parametrize("given", [LEFT_OUT, None, "auto"])
@pytest.mark.parametrize("type", ["WarmupLR", "WarmupDecayLR"])
def test_the_peak_of_a_warm_up_that_does_not_give_one(type, given):
    """lr_schedules.py, lines 728 and 738: no maximum, or null, is the optimizer's rate; WarmupDecayLR's line 818 has
    the default 0.001 instead, and hands a null on to WarmupLR. "auto" is not DeepSpeed's: the Hugging Face Trainer
    replaces it with its learning rate, which is the optimizer's too.
    """
    peak = 0.001 if type == "WarmupDecayLR" and given is LEFT_OUT else 3e-5
    params = {"warmup_num_steps": 10} | ({"total_num_steps": 40} if type == "WarmupDecayLR" else {})
    params |= {} if given is LEFT_OUT else {"warmup_max_lr": given}
    config = Config.load({"scheduler": {"type": type, "params": params}})
    for schedule in (make_lr_schedule(type, params, 3e-5), lr_schedules.from_config(config.scheduler, 3e-5)):
        assert max(measured(schedule.lr)) == pytest.approx(peak, rel=2e-6)
        verb = "warmup_max_lr 0.001 overrides" if peak == 0.001 else "the rate warms up to"
        assert f"{verb} the optimizer's lr 3e-05" in schedule.notes[1]
    assert config.autos == (("scheduler.params.warmup_max_lr",) if given == "auto" else ())


def test_optaxs_schedules():
    offered = {name for name in dir(optax) if name.endswith(("_schedule", "_schedules", "exponential_decay"))}
    assert offered - {"scale_by_schedule"} == {*lr_schedules.OPTAX_SCHEDULES, "join_schedules"}
    params = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 5, "decay_steps": 50}
    reference = measured(optax.warmup_cosine_decay_schedule(**params))
    schedule = make_lr_schedule("warmup_cosine_decay_schedule", params, 1e-3)
    assert measured(schedule.lr) == pytest.approx(reference, rel=1e-5, abs=1e-7)
    params = {"init_value": 1.0, "boundaries_and_scales": {"3": 0.5}, "warmup_max_lr": "auto"}
    steps = make_lr_schedule("piecewise_constant_schedule", params, 1e-3)
    assert measured(steps.lr, 5) == [1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("type", "params", "words"),
    [
        ("WarmupLr", {}, ["scheduler.type: 'WarmupLr'", "did you mean 'WarmupLR'", "or one of optax's"]),
        ("WarmupLR", {"warmup_num_step": 3}, ["scheduler.params.warmup_num_step", "(value 3)", "'warmup_num_steps'"]),
        ("WarmupLR", {"warmup_num_steps": -1}, ["warmup_num_steps: -1", "a non-negative integer"]),
        ("WarmupLR", {"warmup_type": "cubic"}, ["'cubic'", '"log" or "linear"']),
        ("WarmupLR", {"last_batch_iteration": 5}, ["last_batch_iteration: 5", "checkpoint"]),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, ['total_num_steps = "auto"', "pass total_num_steps="]),
        ("WarmupDecayLR", {"total_num_steps": 100}, ["warmup_num_steps = 1000 and total_num_steps = 100: "]),
        ("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 101}, ["warmup_num_steps = 101 and total_"]),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max": 1}, ["cycle_max_lr: missing", "did you mean 'cycle_max_lr'"]),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_stair_count": 2**30}, ["too many"]),
        ("OneCycle", {"cycle_min_lr": 1e39, "cycle_max_lr": 1.0}, ["cycle_min_lr: 1e+39", "float32's range"]),
        ("join_schedules", {}, ["scheduler.type: 'join_schedules' is unknown"]),
        ("piecewise_constant_schedule", {"init_value": 1.0, "boundaries_and_scales": {"x": 1}}, ["refuses", "'x'"]),
    ],
)
def test_errors(type, params, words):
    says(lambda: make_lr_schedule(type, params, 1e-3), *words)
