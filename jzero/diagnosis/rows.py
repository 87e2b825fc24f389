"""Which rows of a micro-batch are bad, by testing groups of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST = 4  # rows to find; each takes about two runs of a micro-batch for every power of two in its size


def bad_rows(rows: Sequence[int], is_bad: Callable[[Sequence[int]], bool], most: int = MOST) -> list[int]:
    """Find rows that are bad by themselves.

    Args:
      is_bad: whether a micro-batch of these rows, repeated to fill it, is bad.
      most: rows to find before the search ends.

    >>> bad_rows(range(16), lambda some: 3 in some or 12 in some)
    [3, 12]
    """
    found: list[int] = []
    groups = [list(rows)]
    while groups and len(found) < most:
        group = groups.pop()
        if not is_bad(group):
            continue
        if len(group) == 1:
            found += group
            continue
        middle = len(group) // 2
        groups += [group[middle:], group[:middle]]
    return found
