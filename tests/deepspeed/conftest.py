"""DeepSpeed's checkpoints, unpacked once."""

import pytest
from runs import unpack


@pytest.fixture(scope="session")
def runs_of_deepspeed(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("deepspeed"))
