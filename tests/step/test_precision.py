"""The loss scaler against a plain-Python re-statement of DeepSpeed's, and the dtype policy."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.config import Config
from jzero.loss_scale import Scaler
from jzero.precision import Precision


class Reference:
    """Section by section what the scaler has to do, one step at a time, in Python numbers."""

    def __init__(self, settings):
        self.s = settings
        self.scale, self.hysteresis, self.iteration, self.last_overflow = settings.initial, settings.hysteresis, 0, -1
        self.stuck, self.skipped, self.culprits = 0, 0, None

    def step(self, finite):
        overflow = not all(finite)
        if overflow:
            self.skipped += 1
            self.culprits = [not f for f in finite] if self.culprits is None else self.culprits
            at_minimum = not self.s.dynamic or self.scale <= self.s.minimum
            self.stuck = self.stuck + 1 if at_minimum else 0
            if self.s.dynamic:
                if self.hysteresis == 1:
                    self.scale = max(self.scale / 2, self.s.minimum)
                else:
                    self.hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            self.stuck, self.culprits = 0, None
            if self.s.dynamic:
                if self.s.consecutive:
                    self.hysteresis = self.s.hysteresis
                stable = (self.iteration - self.last_overflow) - 1
                if stable > 0 and stable % self.s.window == 0:
                    self.scale *= 2
                    self.hysteresis = self.s.hysteresis
        self.iteration += 1


SCALERS = st.builds(
    Scaler,
    dynamic=st.booleans(),
    initial=st.sampled_from([1.0, 4.0, 2.0**16, 3.0]),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    minimum=st.sampled_from([0.25, 1.0, 2.0]),
)
MOST = 40
STEPS = st.lists(st.sampled_from([(True, True), (True, True), (False, True), (True, False)]), max_size=MOST)


@partial(jax.jit, static_argnames=("dynamic", "consecutive"))
def scan(finite, **numbers):
    """The state after each step; a program for all settings that are numbers."""
    scaler = Scaler(**numbers)

    def step(state, finite):
        state = scaler.update(state, finite)
        return state, state

    return jax.lax.scan(step, scaler.init(finite.shape[1]), finite)[1]


@settings(deadline=None, max_examples=80)
@given(scaler=SCALERS, steps=STEPS)
def test_scaler(scaler, steps):
    reference = Reference(scaler)
    states = jax.device_get(scan(np.array(steps + [(True, True)] * (MOST - len(steps))), **vars(scaler)))
    for i, finite in enumerate(steps):
        reference.step(finite)
        state = jax.tree.map(lambda x, i=i: x[i], states)
        assert state.scale == reference.scale
        assert (state.iteration, state.last_overflow) == (reference.iteration, reference.last_overflow)
        assert (state.stuck, state.skipped) == (reference.stuck, reference.skipped)
        assert state.culprits.tolist() == (reference.culprits or [False, False])
        if scaler.dynamic:
            assert state.hysteresis == reference.hysteresis


def config(precision="fp32", accum=None, wire=None, **sections):
    if precision != "fp32":
        sections = {**sections, precision: {"enabled": True, **sections.get(precision, {})}}
    return Config.load({"data_types": {"grad_accum_dtype": accum}, "communication_data_type": wire, **sections})


LOW = "master_weights_and_grads"
LOW_STATE = {f"bf16_{LOW}": True, "bf16_optimizer_states": True}
NO_CHECK = {"check_grad_overflow": False}


@pytest.mark.parametrize(
    ("made", "dtypes", "scaling"),
    [
        (config(), "float32 float32 float32 float32 float32", (True, False, 1)),
        (config("bf16"), "bfloat16 float32 float32 bfloat16 float32", (True, False, 1)),
        (config("fp16"), "float16 float32 float32 float16 float32", (True, True, 65536)),
        (config("bf16", "bf16", "fp32", bf16=NO_CHECK), "bfloat16 float32 bfloat16 float32 float32", (False, False, 1)),
        (config("bf16", bf16={f"bf16_{LOW}": True}), "bfloat16 bfloat16 float32 bfloat16 float32", (True, False, 1)),
        (config("fp16", fp16={f"fp16_{LOW}": True}), "float16 float16 float32 float16 float32", (True, True, 65536)),
        (config("bf16", bf16=LOW_STATE), "bfloat16 bfloat16 float32 bfloat16 bfloat16", (True, False, 1)),
        (config("bf16", "float16", "torch.half"), "bfloat16 float32 float16 float16 float32", (True, False, 1)),
        (config("fp32", bf16=LOW_STATE | NO_CHECK), "float32 float32 float32 float32 float32", (True, False, 1)),
        (config("fp16", fp16={"loss_scale": 128}), "float16 float32 float32 float16 float32", (True, False, 128)),
    ],
)
def test_policy(made, dtypes, scaling):
    """Of the computation, masters, sums, collectives and moments; whether steps are checked, and the loss scale."""
    policy = Precision.from_config(made)
    names = policy.compute, policy.master, policy.accum, policy.reduce, policy.optimizer_state
    assert " ".join(map(str, names)) == dtypes
    assert (policy.check_overflow, policy.scaler.dynamic, policy.scaler.initial) == scaling


@pytest.mark.parametrize("fp16", [{"initial_scale_power": 127}, {"loss_scale": 3e38}, {"min_loss_scale": 1e-37}])
def test_the_largest_settings_keep_the_scale_finite_and_positive(fp16):
    scaler = Precision.from_config(config("fp16", fp16={"loss_scale_window": 1, "hysteresis": 1, **fp16})).scaler
    found = scan(np.array([[True]] * 5 + [[False]] * 300), **vars(scaler)).scale
    assert np.isfinite(found).all()
    assert min(found) > 0
    assert np.isfinite(scaler.init(1).scale)
