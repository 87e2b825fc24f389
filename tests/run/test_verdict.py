"""The verdict at the end of a run: shares of hand-made times."""

from types import SimpleNamespace

import pytest

from jzero.config import Config
from jzero.profiling.device_times import DeviceTimes
from jzero.run import summary
from jzero.run.clock import COMPILE, DATA, DEVICE, HOST, SCRIPT
from jzero.run.speed import Totals
from jzero.run.summary import name_bottleneck

GPUS = [SimpleNamespace(platform="gpu")] * 8
BUSY = {DEVICE: 95.0, DATA: 3.0, HOST: 1.0, SCRIPT: 1.0}


def config(stage=0, **more):
    return Config.load({"train_batch_size": 8, "zero_optimization": {"stage": stage}, **more})


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ({DEVICE: 60.0, DATA: 30.0, HOST: 5.0, SCRIPT: 5.0}, "data-bound: the devices waited for data, 30% of the"),
        ({DEVICE: 70.0, DATA: 9.0, HOST: 1.0, SCRIPT: 20.0}, "script-bound: the devices waited for the script"),
        ({DEVICE: 70.0, HOST: 30.0}, "host-bound: the devices waited for the host to start a step, 30%"),
        ({**BUSY, COMPILE: 900.0}, "compute-bound: the devices computed, 95% of the time of the steps"),
    ],
)
def test_the_largest_wait_is_named(seconds, first):
    lines = name_bottleneck(seconds, config(), GPUS[:1])
    assert lines[0].startswith(first)
    assert lines[1].startswith("try ")
    assert 1 <= len(lines[1].split("; or ")) <= 3


def test_a_profile_tells_communication_from_computation():
    hidden = DeviceTimes({"forward": 50.0, "backward": 40.0, "collectives": 10.0}, 200.0)
    exposed = DeviceTimes({"forward": 40.0, "backward": 30.0, "collectives": 30.0}, 0.0)
    assert name_bottleneck(BUSY, config(3), GPUS, hidden)[0].startswith("compute-bound")
    said, advice = name_bottleneck(BUSY, config(3), GPUS, exposed)
    assert said == "communication-bound: collectives that no computation hides took, 30% of a profiled step"
    assert "zero_optimization.stage: 2" in advice
    assert "zero_optimization.stage: 2" not in name_bottleneck(BUSY, config(1), GPUS, exposed)[1]
    (unknown,) = name_bottleneck(BUSY, config(3), GPUS)
    assert "wall_clock_breakdown" in unknown


def test_settings_that_are_on_are_not_advised():
    assert "bf16" in name_bottleneck(BUSY, config(), GPUS[:1])[1]
    full = {"bf16": {"enabled": True}, "activation_checkpointing": {"policy": "full"}}
    advice = name_bottleneck(BUSY, config(**full), GPUS[:1])[1]
    assert "bf16" not in advice
    assert 'policy: "matmuls"' in advice
    none = full | {"activation_checkpointing": {"policy": "none"}}
    assert "matmuls" not in name_bottleneck(BUSY, config(**none), GPUS[:1])[1]


def test_bf16_is_advised_where_it_is_faster():
    """CPUs compute more slowly in bf16."""
    cpu = SimpleNamespace(platform="cpu")
    assert name_bottleneck(BUSY, config(), GPUS[:1])[1] == f"try bf16.enabled: true; or {summary.MICRO[1]}"
    assert name_bottleneck(BUSY, config(), [cpu])[1] == f"try {summary.MICRO[1]}"


def test_the_verdict_is_part_of_the_summary():
    """Of a run that was long enough."""
    verdict = name_bottleneck(BUSY, config(), GPUS[:1])
    made = summary.Summary(BUSY, Totals(20, 160, None, 0), None, {}, {}, verdict=verdict)
    assert [line.split(":")[0].strip() for line in str(made).splitlines()[2:]] == ["compute-bound", "try bf16.enabled"]
    assert name_bottleneck({part: spent / 10 for part, spent in BUSY.items()}, config(), GPUS[:1]) == []
