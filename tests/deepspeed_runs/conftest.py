"""DeepSpeed's checkpoints: those stored here, or those that make_checkpoints.py has just written (in CI)."""

import os
import tarfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def runs_of_deepspeed(tmp_path_factory):
    if fresh := os.environ.get("JZERO_DEEPSPEED_RUNS"):
        return Path(fresh)
    directory = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(Path(__file__).with_name("checkpoints.tar.xz")) as archive:
        archive.extractall(directory, filter="data")
    return directory
