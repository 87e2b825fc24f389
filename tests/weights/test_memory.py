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
PIECE = 128  # MiB: of a leaf
SHAPE = ("--preset", "tiny", "--tied", "--vocab_size", str(LEAF * 2**20 // 4 // 128))


@pytest.fixture
def phase(tmp_path):
    """The report of a phase of experiments/benchmarks/weights.py, by default on a Llama with a large vocabulary."""
    path = tmp_path / "large"

    def phase(name, devices=4, shape=SHAPE):
        done = subprocess.run(
            [sys.executable, "-m", "experiments.benchmarks.weights", name, path, "--devices", str(devices), *shape],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return phase


@pytest.mark.slow
def test_host_memory(phase):
    """Export needs two chunks of a leaf (one device's part each); load needs two pieces of one besides the result."""
    phase("make")
    found = phase("export")
    assert found["largest_leaf"] == LEAF
    assert found["largest_part"] == LEAF / 4
    assert found["peak"] <= 2 * LEAF / 4 + FIXED
    for devices in (4, 1):
        found = phase("load", devices)
        assert found["result"] >= LEAF
        assert found["peak"] <= found["result"] + 2 * PIECE + 2 * FIXED  # programs that copy pieces, too


@pytest.mark.slow
def test_host_memory_of_sharded_files(phase):
    """A leaf of many tensors is larger than what load needs besides the result."""
    shape = ("--preset", "1b", "--layers", "8", "--frozen")
    phase("sparse", 1, shape)
    found = phase("load", 1, shape)
    assert found["largest_leaf"] == 8 * 2 * 2048 * 8192 * 4 / 2**20 == 1024  # in float32; it is loaded in bfloat16
    assert found["result"] > 1024
    assert found["peak"] <= found["result"] + 2 * PIECE + 2 * FIXED  # programs that copy pieces, too
