"""Runs that leave SIGTERM alone, and how long they are, for the tests of resuming."""

import pytest

from jzero.distributed import preemption

STEPS, SAVED, NEXT = 7, 3, 5


@pytest.fixture(autouse=True, scope="module")
def no_signal_handler():
    """SIGTERM stays pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "listen", lambda: None)
        yield
