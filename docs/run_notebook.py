"""Runs experiments/quickstart.ipynb and stores its outputs in it: `python docs/run_notebook.py`."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).parent.parent / "experiments" / "quickstart.ipynb"


def run(path: Path) -> NotebookNode:
    """Run all cells in a new kernel, in the notebook's directory; return the notebook with its outputs.

    Raises:
      CellExecutionError: a cell failed; the message has its code and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    root = str(path.parent.parent)  # this checkout, not another one that is installed
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute(env=env)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ in every run
        if cell.cell_type == "code":  # standard error has what JAX's libraries log, and notices of slow work
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    nbformat.write(run(NOTEBOOK), NOTEBOOK)
