"""DeepSpeed's checkpoints: those stored here, or those that make_checkpoints.py has just written (in CI)."""

import os
from pathlib import Path

import pytest
from stored_runs import unpack


@pytest.fixture(scope="session")
def runs_of_deepspeed(tmp_path_factory):
    fresh = os.environ.get("JZERO_DEEPSPEED_RUNS")
    return Path(fresh) if fresh else unpack(tmp_path_factory.mktemp("deepspeed"))
