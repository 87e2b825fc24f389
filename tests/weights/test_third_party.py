"""Models of other people's packages train as with Flax and optax on one device; what is not installed is skipped."""

import pytest

from experiments.third_party import checkouts, packages  # noqa: F401  they register their cases
from experiments.third_party.cases import CASES
from experiments.third_party.compare import Layout, expected, found, largest_difference, rounding

HEAVY = {"flaxmodels_resnet"}  # two minutes of compilation: python -m experiments.third_party runs it
LAYOUTS = [Layout(3), Layout(3, tensor=2), Layout(3, context=2), Layout(1, pipe=2)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the packages
@pytest.mark.parametrize("name", sorted(CASES.keys() - HEAVY))
def test_third_party_model(name):
    """Under `tensor` the table is found by trying."""
    case = CASES[name]
    if not case.installed:
        pytest.skip(f"needs {case.package}")
    known = expected(case)
    assert known.losses[-1] < known.losses[0]
    # BatchNorm over few values amplifies rounding: reversing the rows moves such models too.
    losses, parameters = (
        max(bound, 4 * moved) for bound, moved in zip((1e-6, 2e-6), rounding(case, known), strict=True)
    )
    for layout in LAYOUTS if case.stack else LAYOUTS[:-1]:
        ours = found(case, layout, known)
        assert largest_difference(ours.losses, known.losses) < losses, layout
        assert ours.parameters < parameters, layout
        assert ours.whole == (), layout  # no primitive lacks a rule
