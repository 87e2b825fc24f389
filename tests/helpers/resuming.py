"""Data without a length, runs that leave SIGTERM alone, and how long they are, for the tests of resuming."""

import pytest
from layouts import data

from jzero.distributed import preemption

STEPS, SAVED, NEXT = 7, 3, 5


def samples():
    """Data without a length."""
    whole = data()
    return ({name: x[i] for name, x in whole.items()} for i in range(100))


@pytest.fixture(autouse=True, scope="module")
def no_signal_handler():
    """SIGTERM stays pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "listen", lambda: None)
        yield
