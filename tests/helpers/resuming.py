"""Data without a length, and how long the runs of the tests of resuming are."""

from layouts import data

STEPS, SAVED, NEXT = 7, 3, 5


def samples():
    """Data without a length."""
    whole = data()
    return ({name: x[i] for name, x in whole.items()} for i in range(100))
