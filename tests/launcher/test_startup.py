"""Help and `--dry_run` import no third-party module but PyYAML, for Kubernetes: JAX takes time, and prints logs."""

import json
import os
import subprocess
import sys

from jobs import ROOT
from planning import A, B

ON_HOSTS = ["--dry_run", "--hostfile", "hosts"]
ANSWERS = {
    "help": ["--help"],
    **{name: [name, "--help"] for name in ("report", "export", "plot", "plan")},
    "ssh": [*ON_HOSTS, "train.py"],
    "slurm": [*ON_HOSTS, "--launcher", "slurm", "train.py"],
    "openmpi": [*ON_HOSTS, "--launcher", "openmpi", "train.py"],
    "no_ssh": ["--dry_run", "--platform", "cpu", "--no_ssh", "--node_rank", "0", "--num_nodes", "1", "train.py"],
    "refused": ["--dry_run", "--hostfile", "nowhere", "train.py"],
    "k8s": [*ON_HOSTS, "--launcher", "k8s", "--launcher_args", "image=i", "train.py"],
}
THIRD = """
import atexit, contextlib, json, runpy, sys
before = set(sys.modules)
def third():
    names = {name.partition(".")[0] for name in set(sys.modules) - before}
    return sorted(names - {"jzero"} - sys.stdlib_module_names)
"""


def python(code, *words, folder):
    """Run a program whose last line is JSON; return it, and its stderr."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", THIRD + code, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180, check=False)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_no_third_party_module_is_imported(tmp_path):
    (tmp_path / "hosts").write_text(f"{A} slots=2\n{B} slots=2\n")
    (tmp_path / "train.py").write_text("")
    code = """
from jzero import cli
found = {}
for name, words in json.loads(sys.argv[1]).items():
    with contextlib.suppress(SystemExit):
        cli.main(words)
    found[name] = third()
print("", json.dumps(found))
"""
    found, errors = python(code, json.dumps(ANSWERS), folder=tmp_path)
    others = {name: [one for one in names if "cython" not in one] for name, names in found.items()}  # PyYAML's own
    assert others == {**{name: [] for name in ANSWERS}, "k8s": ["yaml"]}
    assert errors == "jzero: --hostfile = nowhere: no such file\n"


def test_a_job_s_command_does_not_import_jax(tmp_path):
    """The command starts a job faster, and uses less memory beside the processes that it waits for."""
    (tmp_path / "source").write_text("export SEEN=sourced")
    options = ["--platform", "cpu", "--venv_script", "./source", "--no_python", "--no_local_rank"]
    code = "atexit.register(lambda: print('', json.dumps(third())))\nrunpy.run_module('jzero', run_name='__main__')"
    found, errors = python(code, *options, "sh", "-c", "echo $SEEN $JZERO_JOB_ID > said", folder=tmp_path)
    assert not {"jax", "jaxlib", "numpy", "pydantic"} & set(found)
    assert (tmp_path / "said").read_text().startswith("sourced "), errors


def test_an_import_leaves_out_what_only_some_calls_use(tmp_path):
    """In a process of its own: `jzero.initialize` took 0.5 s of 2.7 s for these."""
    code = "import jzero\nfirst = third()\njzero.initialize, jzero.from_flax\nprint(json.dumps([first, third()]))"
    (first, then), _ = python(code, folder=tmp_path)
    assert not {"jax", "jaxlib", "numpy", "flax", "optax", "pydantic", "rich"} & set(first)
    assert "jax" in then
    # Checkpoints, traces of layers and exports import what they need, when they do.
    assert not {"orbax", "tensorstore", "scipy", "grain", "matplotlib"} & set(then)
