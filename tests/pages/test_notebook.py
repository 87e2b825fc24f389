"""experiments/quickstart.ipynb: its stored outputs are those of a whole run, and its cells run."""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "experiments" / "quickstart.ipynb"
PICTURES = ["draw_mesh", "draw_sharding", "draw_memory", "plt.show", "draw_figure"]


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def the_cell(cells, text):
    (found,) = (cell for cell in cells if text in source(cell))
    return found


def printed(cells, text):
    outputs = the_cell(cells, text)["outputs"]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def check(notebook):
    """Check the outputs of a run: pictures, tables, the losses of the two layouts, the plan, the text."""
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "display_data", "execute_result"}  # no error
    for text in PICTURES:
        assert "image/png" in the_cell(cells, text)["outputs"][-1]["data"], text
    for cell in cells:
        if source(cell) == "engine.state":
            assert "params/ends/embed" in "".join(cell["outputs"][0]["data"]["text/html"])
    losses = re.findall(r"([\d.]+) in a pipeline, ([\d.]+) without", printed(cells, "pipe=2, devices=many)\npiped"))
    piped, plain = (list(map(float, column)) for column in zip(*losses, strict=True))
    assert len(piped) == 5
    assert piped == pytest.approx(plain, rel=1e-3)
    assert piped[-1] < piped[0] - 1
    memory = r"Memory\(peak [\d.]+ GiB.*\n\n.*all-gather .* zero +512 +80 "
    assert re.search(memory, printed(cells, "gpu_devices"), re.S)
    assert printed(cells, "engine.generate").startswith("def main(args):\n    ")


def test_the_stored_outputs_are_those_of_a_run():
    assert NOTEBOOK.stat().st_size < 1.5e6
    check(json.loads(NOTEBOOK.read_text()))


@pytest.mark.parametrize("place", ["experiments", "wheel", "colab", "elsewhere"])
def test_the_first_cell_installs_what_there_is(place, tmp_path, monkeypatch):
    """A clone, a wheel next to the notebook, or one that Colab asks for; otherwise it says what is missing."""
    name, calls = "jzero-0.2.0-py3-none-any.whl", []
    for directory in ("jzero", place):
        (tmp_path / directory).mkdir()
    if place in ("experiments", "wheel"):
        (tmp_path / "pyproject.toml" if place == "experiments" else tmp_path / place / name).touch()
    monkeypatch.chdir(tmp_path / place)
    monkeypatch.setattr(subprocess, "run", lambda words, check: calls.append(words[-1]))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if place == "colab":
        files = SimpleNamespace(upload=lambda: {name: b""})
        monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(files=files))
        monkeypatch.setitem(sys.modules, "google.colab.files", files)
    cell = compile(source(the_cell(code_cells(json.loads(NOTEBOOK.read_text())), "import importlib")), "cell", "exec")
    if place == "elsewhere":
        with pytest.raises(SystemExit, match="put a wheel of it next to this notebook, or set SOURCE"):
            exec(cell, {})
    else:
        exec(cell, {})
    wheels = {"wheel": f"{tmp_path}/wheel/{name}[plot,plan]", "colab": f"{name}[plot,plan]"}
    assert calls == {"experiments": ["..[plot,plan]"], "elsewhere": []}.get(place, [wheels.get(place)])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.gpu_compile
def test_all_cells_run():
    pytest.importorskip("nbclient")
    check(runpy.run_path(str(ROOT / "docs/run_notebook.py"))["run"](NOTEBOOK))
