"""Host memory of export and load for a model dominated by one leaf: well below two copies of the leaf."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAF = 384  # MiB
FIXED = 64  # MiB: a mapped window of a file and the process's other allocations


@pytest.fixture(scope="module")
def phase(tmp_path_factory):
    """The report of a phase of experiments/benchmarks/weights.py, on a 4-layer Llama with a large vocabulary."""
    path = tmp_path_factory.mktemp("large")

    def phase(name, devices=4):
        done = subprocess.run(
            [sys.executable, "-m", "experiments.benchmarks.weights", name, str(path), "--preset", "tiny", "--tied",
             "--vocab_size", str(LEAF * 2**20 // 4 // 128), "--devices", str(devices)],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    phase("make")
    return phase


@pytest.mark.slow
def test_host_memory(phase):
    """Export needs two chunks of a leaf (one device's part each); load needs one leaf besides the result."""
    found = phase("export")
    assert found["largest_leaf"] == LEAF
    assert found["largest_part"] == LEAF / 4
    assert found["peak"] <= 2 * LEAF / 4 + FIXED
    for devices in (4, 1):
        found = phase("load", devices)
        assert found["result"] >= LEAF
        assert found["peak"] <= found["result"] + LEAF + FIXED
