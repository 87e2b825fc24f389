"""Plots of runs, from their ledgers or from the files of `jsonl_monitor`: as PNG files, a page, or in a notebook.

    jzero.plots.read("runs/first", "runs/second")                # a notebook shows figures and a table
    jzero.plots.read("runs/first", smooth=0.9).write("plots")

matplotlib draws them: pip install 'jzero[plot]'.
"""

from jzero.plots.history import History as History
from jzero.plots.page import Plots as Plots
from jzero.plots.page import read as read
