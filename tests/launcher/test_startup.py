"""Help and `--dry_run` import no third-party module but PyYAML, for Kubernetes: JAX takes time, and prints logs."""

import json
import os
import subprocess
import sys

import pytest
from jobs import ROOT
from planning import A, B

from jzero import cli
from jzero.weights.export import DTYPES

COMMAND = """
import atexit, json, runpy, sys
before = set(sys.modules)
atexit.register(lambda: print("", json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))))
runpy.run_module("jzero", run_name="__main__", alter_sys=True)
"""
ON_HOSTS = ["--dry_run", "--hostfile", "hosts"]
ANSWERS = {
    "help": ["--help"],
    **{name: [name, "--help"] for name in ("report", "export", "plot", "plan")},
    "ssh": [*ON_HOSTS, "train.py"],
    "slurm": [*ON_HOSTS, "--launcher", "slurm", "train.py"],
    "openmpi": [*ON_HOSTS, "--launcher", "openmpi", "train.py"],
    "k8s": [*ON_HOSTS, "--launcher", "k8s", "--launcher_args", "image=i", "train.py"],
    "no_ssh": ["--dry_run", "--platform", "cpu", "--no_ssh", "--node_rank", "0", "--num_nodes", "1", "train.py"],
    "refused": ["--dry_run", "--hostfile", "nowhere", "train.py"],
}


def python(code, *words, folder):
    """Run a program that prints the names of modules; return them, and its stderr."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180, check=False)
    names = set(json.loads(done.stdout.splitlines()[-1]))
    assert "jzero" in names
    return names, done.stderr


def loaded(words, folder):
    """Run `python -m jzero` with these words; return the third-party modules it imports, and its stderr."""
    (folder / "hosts").write_text(f"{A} slots=2\n{B} slots=2\n")
    (folder / "train.py").write_text("")
    names, errors = python(COMMAND, *words, folder=folder)
    return names - {"jzero"} - sys.stdlib_module_names, errors


@pytest.mark.parametrize("answer", ANSWERS)
def test_no_third_party_module_is_imported(tmp_path, answer):
    others, errors = loaded(ANSWERS[answer], tmp_path)
    # PyYAML itself brings Cython's.
    assert {name for name in others if "cython" not in name} == ({"yaml"} if answer == "k8s" else set())
    assert errors == ("jzero: --hostfile = nowhere: no such file\n" if answer == "refused" else "")


def test_a_job_s_command_does_not_import_jax(tmp_path):
    """The command starts a job faster, and uses less memory beside the processes that it waits for."""
    others, _ = loaded(["--platform", "cpu", "--no_python", "--no_local_rank", "true"], tmp_path)
    assert others & {"jax", "jaxlib", "numpy", "pydantic"} == set()


@pytest.mark.parametrize("dtype", DTYPES)
def test_export_offers_every_dtype(capsys, dtype):
    assert cli.main(["export", "nowhere", "out", "--dtype", dtype]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "kept_out"),
    [
        ("import jzero", {"jax", "jaxlib", "numpy", "flax", "optax", "pydantic", "rich"}),
        # Checkpoints, traces of layers and exports import what they need, when they do.
        ("import jzero; jzero.initialize, jzero.from_flax", {"orbax", "tensorstore", "scipy", "grain", "matplotlib"}),
    ],
)
def test_an_import_leaves_out_what_only_some_calls_use(tmp_path, words, kept_out):
    """In a process of its own: `jzero.initialize` took 0.5 s of 2.7 s for these."""
    code = f"import json, sys\n{words}\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    found, _ = python(code, folder=tmp_path)
    assert not found & kept_out
