"""The wheel, built from the sdist, holds what it should, and works in an environment that has nothing else."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jzero

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PYTHONS = ("python3.11", "python3.12", "python3.13")
DATA = {"jzero/py.typed", "jzero/recipes/recipes.json"}


def run(*command, **options):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, command)), env=clean | options.pop("env", {}), capture_output=True, text=True, timeout=1200,
        check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip makes of the sdist, of a copy: setuptools would put what an earlier build left into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for package in ("jzero", "models"):
        ignored = shutil.ignore_patterns("__pycache__", *(["models"] if package == "jzero" else []))
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out)!r}))"
    name = run(sys.executable, "-c", build, cwd=source).splitlines()[-1]
    with tarfile.open(out / name) as sdist:
        packed = {path.partition("/")[2] for path in sdist.getnames()}
    assert packed >= {*FILES, *DATA, "models/decoder.py"}
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, out / name)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_the_models(wheel, tmp_path):
    """And says how to install an extra where no clone is: by the extra's packages."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "jzero").rglob("*.py")}
    assert names == ours | {f"jzero/models/{path.name}" for path in (ROOT / "models").glob("*.py")} | DATA
    assert jzero.__version__ in wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path)
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("cuda12", "flash", "plan", "plot", "tensorboard"):
        code = f"from jzero.errors import install_command; print(install_command({extra!r}))"
        said = run(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        pip, install, *packages = shlex.split(said)
        assert (pip, install) == ("pip", "install")
        assert [Requirement(x) for x in packages] == [Requirement(x.partition(";")[0]) for x in named[extra]]


def runs(python):
    return shutil.which(python) and not subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode


def interpreter(name):
    """The Python of this name, on the path or one of pyenv's; None: there is none."""
    own = sorted(Path.home().glob(f".pyenv/versions/{name.removeprefix('python')}.*/bin/{name}"))
    return next(filter(runs, [name, *map(str, own)]), None)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("python", PYTHONS)
def test_a_wheel_in_an_empty_environment(python, wheel, tmp_path):
    """No clone, no extra: `jzero demo` trains, the table of recipes is there; with transformers a preset is tuned."""
    if (found := interpreter(python)) is None:
        pytest.skip(f"no {python}")
    run(found, "-m", "venv", tmp_path / "venv")
    pip, command = tmp_path / "venv/bin/pip", tmp_path / "venv/bin/jzero"
    install = pip, "install", "-q", "-c", ROOT / "constraints.txt"
    run(*install, wheel)
    run(pip, "check")
    assert run(command, "--version", cwd=tmp_path).startswith("jzero 0.")
    printed = run(command, "demo", "--steps", "12", cwd=tmp_path)
    assert "1 .. 12 steps" in printed
    assert "loss on text that it has not seen" in printed
    assert "llama3-8b-pretrain-8xh100" in run(command, "recipes", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "venv"]  # the demo leaves no file
    run(*install, "transformers", "jinja2")
    samples = [{"prompt": f"What is {i} + 1?", "completion": f" {i + 1}"} for i in range(64)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    run(command, "finetune", "llama:tiny", "sums.jsonl", "--steps", "2", "--evaluations", "1", cwd=tmp_path)
    assert {path.name for path in (tmp_path / "finetuned/model").iterdir()} >= {"model.safetensors", "config.json"}
