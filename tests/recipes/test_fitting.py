"""The micro-batch and the recomputation: the first that suit, by the memory of compiled steps."""

from types import SimpleNamespace

import pytest

from jzero.config.sizes import MICRO
from jzero.recipes import fitting
from jzero.recipes.fitting import Fit, choose_fit

EACH = {"none": 100, "matmuls": 40, "full": 10}  # bytes of a row, besides 100 of state


@pytest.fixture
def compiled(monkeypatch):
    """(the steps that were compiled, the function that makes one); memory is linear in the micro-batch."""
    tried = []

    def make(config):
        tried.append((config[MICRO], config["activation_checkpointing"]["policy"]))
        peak = 100 + tried[-1][0] * EACH[tried[-1][1]]
        return SimpleNamespace(lower=lambda batch: SimpleNamespace(compile=lambda: peak)), None

    monkeypatch.setattr(fitting, "memory", lambda peak, step: SimpleNamespace(peak=peak))
    return tried, make


@pytest.mark.parametrize(
    ("most", "length", "expected"),
    [
        (10_000, 512, Fit(16, "none", 1700)),  # all rows at once
        (1000, 512, Fit(8, "none", 900)),  # 8 x 512 tokens are enough
        (1000, 64, Fit(16, "matmuls", 740)),  # small rows: recompute for a larger micro-batch
        (300, 64, Fit(16, "full", 260)),
        (190, 64, Fit(8, "full", 180)),
        (110, 64, Fit(1, "full", 110)),
        (109, 64, 110),  # nothing fits; this much would be needed
    ],
)
def test_the_fastest_that_fits(most, length, expected, compiled):
    tried, make = compiled
    assert choose_fit(make, {}, rows=16, length=length, most=most) == expected
    assert len(tried) == len(set(tried)) <= 9


def test_what_is_given_is_kept(compiled):
    _, make = compiled
    kept = {"activation_checkpointing": {"policy": "full"}}
    assert choose_fit(make, kept, 16, 64, 10_000) == Fit(16, "full", 260)
    assert choose_fit(make, {MICRO: 2}, 16, 64, 250) == Fit(2, "matmuls", 180)
