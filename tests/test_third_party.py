"""Models of other people's packages train as with Flax and optax on one device; what is not installed is skipped."""

import pytest

from experiments.third_party import checkouts, packages  # noqa: F401  they register their cases
from experiments.third_party.cases import CASES
from experiments.third_party.compare import Layout, expected, found, largest_difference, rounding

HEAVY = {"flaxmodels_resnet"}  # two minutes of compilation: python -m experiments.third_party runs it


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the packages
@pytest.mark.parametrize("name", sorted(CASES.keys() - HEAVY))
def test_third_party_model(name):
    case = CASES[name]
    if not case.installed:
        pytest.skip(f"needs {case.package}")
    start, losses = expected(case)
    assert losses[-1] < losses[0]
    # BatchNorm over few values amplifies rounding: reversing the rows moves such losses too.
    bound = max(1e-6, 4 * rounding(case, losses))
    for layout in (Layout(3), *([Layout(1, pipe=2)] if case.stack else [])):
        assert largest_difference(found(case, layout, start), losses) < bound, layout
