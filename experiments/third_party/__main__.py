"""Train every third-party model that is installed, with jzero on eight simulated devices and plainly on one.

    python -m experiments.third_party            # or: python -m experiments.third_party mamba2 jraphx_gcn

It prints one line of a table per model.
"""

from __future__ import annotations

import sys
import traceback

from . import checkouts, packages  # noqa: F401  they register their cases
from .cases import CASES, Case
from .compare import Layout, devices, expected, found, largest_difference, rounding

LAYOUTS = Layout(0), Layout(3), Layout(1, pipe=2)  # the last one cuts a stack


def main(names: list[str]) -> None:
    devices()
    print("| model | package | lines | loss | rounding | ZeRO-0 | ZeRO-3 | pipe 2 |\n|---|---|---|---|---|---|---|---|")
    for name in names or CASES:
        case = CASES[name]
        if case.installed:
            print(f"| {name} | {case.package} {case.version} | {case.lines} | {' | '.join(row(case))} |", flush=True)
        else:
            print(f"| {name} | {case.package}: not installed | {case.lines} | | | | | |", flush=True)


def row(case: Case) -> list[str]:
    """Return the cells of a case: its losses, and differences from them."""
    try:
        start, losses = expected(case)
    except Exception as error:
        traceback.print_exc()
        return [f"fails without jzero too: {type(error).__name__}", "", "", "", ""]
    cells = [f"{losses[0]:.3f} to {losses[-1]:.3f}", f"{rounding(case, losses):.0e}"]
    for layout in LAYOUTS if case.stack else LAYOUTS[:2]:
        try:
            cells.append(f"{largest_difference(found(case, layout, start), losses):.0e}")
        except Exception as error:
            traceback.print_exc()
            cells.append(type(error).__name__)
    return cells + [""] * (5 - len(cells))


if __name__ == "__main__":
    main(sys.argv[1:])
