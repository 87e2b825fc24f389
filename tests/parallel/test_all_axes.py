"""All six axes at once, on 64 simulated devices: losses, parameters, text and a checkpoint of one device.

The oracle (`helpers.group_layouts.plain`, and `continued` in `helpers.all_axes`) is Flax and optax on one device.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from helpers.sampling import some

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.processes
@pytest.mark.parametrize("schedule", some(["1f1b", "gpipe", "interleaved", "zero_bubble"], ["zero_bubble"]))
def test_one_device_computes_the_same(schedule):
    path = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    command = [sys.executable, "-m", "helpers.all_axes", schedule]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900)
    assert not run.returncode, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert found["devices"] == 64
    assert found["losses"] < 1e-6
    assert found["parameters"] < 5e-6
    assert found["loss after loading"] < 1e-6
    assert found["parameters after loading"] < 5e-6
    assert found["other tokens"] == 0
