"""Choose the cases of the default run; the others get the markers `slow` and `matrix`, and CI runs a part of them.

A bug in a layout shows in one setting or in two together far more often than in three (Kuhn, Wallace and Gallo, 2004,
"Software fault interactions"), so a sample in which all pairs occur finds nearly as much as the full matrix.
"""

from itertools import combinations

import pytest


def sample(cases, levels=lambda case: case, strength=2):
    """Mark all cases but a covering sample of them.

    Args:
        cases: the full matrix; a case is a parameter, or a plain tuple of several.
        levels: the settings of a case, as a tuple.
        strength: how many settings to combine: the sample has each value of each setting (1), each pair of values that
            the full matrix has (2).

    Returns:
        The cases in their order, for `pytest.mark.parametrize`.

    >>> matrix = [(stage, size) for stage in range(3) for size in "SML"]
    >>> [case.values for case in sample(matrix, strength=1) if not case.marks]
    [(0, 'S'), (1, 'M'), (2, 'L')]
    """
    cases = list(cases)
    uncovered = [set(combinations(enumerate(levels(case)), strength)) for case in cases]
    chosen = set()
    while any(uncovered):
        best = max(range(len(cases)), key=lambda i: len(uncovered[i]))  # of equals the first
        chosen.add(best)
        covered = set(uncovered[best])
        uncovered = [rest - covered for rest in uncovered]
    return [_param(case, i in chosen) for i, case in enumerate(cases)]


def keep(cases, chosen):
    """Mark all cases but the chosen ones; every chosen one must be a case."""
    cases, chosen = list(cases), list(chosen)
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, unknown
    return [_param(case, case in chosen) for case in cases]


def some(cases, chosen):
    """Mark all cases as slow, and those that are not among the chosen ones as a part of the full matrix."""
    return [pytest.param(*case.values, marks=(*case.marks, pytest.mark.slow)) for case in keep(cases, chosen)]


def _param(case, chosen):
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=() if chosen else (pytest.mark.slow, pytest.mark.matrix))
