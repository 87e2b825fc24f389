"""Plots of runs, from their ledgers or from the files of `jsonl_monitor`: as PNG files, a page, or in a notebook.

    jzero.plots.read("runs/first", "runs/second")                # a notebook shows figures and a table
    jzero.plots.read("runs/first", smooth=0.9).write("plots")

matplotlib draws them: the extra `plot`.
"""

from typing import Any

__all__ = ["History", "Plots", "read"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jzero.plots import run_plots  # here, so that `jzero plot --help` does not import NumPy

        return getattr(run_plots, name)
    raise AttributeError(f"module 'jzero.plots' has no attribute {name!r}")
