"""The command `jzero plot`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jzero.errors import escaped, one_line


def main(argv: Sequence[str]) -> int:
    """Write the plots of runs, and print the files and each run's goodput."""
    p = argparse.ArgumentParser(
        prog="jzero plot",
        description="Draw loss, metrics, speed, memory and goodput of runs: PNG files, and one page (index.html).",
    )
    p.add_argument(
        "runs", nargs="+", metavar="RUN", help="a checkpoint directory (with a ledger), or one of jsonl_monitor"
    )
    p.add_argument("--out", default="plots", metavar="DIR", help="default: plots")
    p.add_argument("--metric", action="append", default=[], metavar="NAME", help="draw this one; may be repeated")
    p.add_argument("--x", choices=["step", "samples", "time"], default="step", help="the horizontal axis")
    p.add_argument(
        "--smooth", type=float, default=0.0, metavar="W", help="weight of the past in a moving average, as 0.9"
    )
    a = p.parse_args(argv)
    from jzero.plots.run_plots import read

    plots = read(*a.runs, metrics=a.metric, x=a.x, smooth=a.smooth)
    for file in plots.write(a.out):
        print(escaped(file))
    for history in plots.histories:
        if history.goodput:
            print(f"{one_line(history.name)}: {history.goodput}")
    return 0
