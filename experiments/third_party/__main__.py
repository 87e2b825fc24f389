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

LAYOUTS = {
    "ZeRO-0": Layout(0), "ZeRO-3": Layout(3), "tensor 2": Layout(3, tensor=2), "context 2": Layout(3, context=2),
    "pipe 2": Layout(1, pipe=2),  # cuts a stack
}  # fmt: skip
TITLES = ["model", "package", "lines", "loss", "rounding", *LAYOUTS]


def main(names: list[str]) -> None:
    devices()
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for name in names or CASES:
        case = CASES[name]
        if case.installed:
            print(f"| {name} | {case.package} {case.version} | {case.lines} | {' | '.join(row(case))} |", flush=True)
        else:
            print(f"| {name} | {case.package}: not installed | {case.lines} |{' |' * (len(TITLES) - 3)}", flush=True)


def row(case: Case) -> list[str]:
    """Return the cells of a case: its losses; for each layout differences of losses and of parameters, fallbacks."""
    try:
        known = expected(case)
    except Exception as error:
        traceback.print_exc()
        return [f"fails without jzero too: {type(error).__name__}", *[""] * (1 + len(LAYOUTS))]
    cells = [f"{known.losses[0]:.3f} to {known.losses[-1]:.3f}", ", ".join(f"{x:.0e}" for x in rounding(case, known))]
    for layout in LAYOUTS.values():
        if layout.pipe > 1 and not case.stack:
            cells.append("")
            continue
        try:
            ours = found(case, layout, known)
            loss = largest_difference(ours.losses, known.losses)
            cells.append(", ".join([f"{loss:.0e}", f"{ours.parameters:.0e}", *ours.whole]))
        except Exception as error:
            traceback.print_exc()
            cells.append(type(error).__name__)
    return cells


if __name__ == "__main__":
    main(sys.argv[1:])
