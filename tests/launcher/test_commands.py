"""The commands of a plan: quoting, the environment, those for Slurm and Open MPI; and what a command imports."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from jobs import ROOT, A, B

import jzero
from jzero import cli
from jzero.errors import ConfigError
from jzero.launcher import options
from jzero.launcher.environment import propagated
from jzero.launcher.job import make_job
from jzero.launcher.output import is_noise
from jzero.launcher.transports import BOOT

NASTY = [
    "it's", '"two"', "$HOME", "$(id)", "$$", "`id`", "a;b", "a\nb", "*", "", "a b", "\\", "é", "~", "#", "!x", "&&",
]  # fmt: skip


def test_script(here):
    for words, argv in (
        (["train.py"], [sys.executable, "-u", "train.py", "--local_rank=1"]),
        (["--module", "train.py"], [sys.executable, "-u", "-m", "train.py", "--local_rank=1"]),
        (["--no_local_rank", "--no_python", "sh"], ["sh"]),
    ):
        words = ["--platform", "cpu", "--num_gpus", "2", *words, "--lr", "1"]
        (command,) = here.dry(*words)["commands"]
        assert command[0] == sys.executable
        shown = [word for word in argv if word != "--local_rank=1"]
        assert command[command.index(BOOT) + 1 :] == [*shown, "--lr", "1"]
        job = make_job(options.parse(words), os.environ, os.getcwd())
        assert job.command(job.processes[1]) == [*argv, "--lr", "1"]


def line_of(command):
    """Split the last word of an ssh command as a shell does."""
    cd, folder, and_, *words = shlex.split(command[-1])
    assert (cd, folder, and_) == ("cd", os.getcwd(), "&&")
    return words


def test_ssh(here):
    path = here.hosts(f"{A} slots=1", "localhost slots=1", f"{B} slots=1")
    words = ["--ssh_port", 2222, "--launcher_args=-i 'my key' -A", "train.py", *NASTY]
    first, local, last = here.dry("--hostfile", path, *words)["commands"]
    assert local[local.index("-c") :] == ["-c", BOOT, sys.executable, "-u", "train.py", *NASTY]
    for command, host in ((first, A), (last, B)):
        assert command[:2] == ["ssh", "-T"]
        assert "BatchMode=yes" in command
        assert command[-8:-1] == ["-p", "2222", "-i", "my key", "-A", "--", host]
        assert line_of(command) == ["exec", *local]


def test_mpirun(here, monkeypatch):
    """It replaces this process, and passes variables on by name: others can read a command line."""
    ran = []
    monkeypatch.setattr(os, "execvpe", lambda *call: ran.append(call))
    monkeypatch.setenv("JZERO_HANG_TIMEOUT", "0")
    path = here.hosts(f"{A} slots=2", f"{B} slots=3")
    words = ["--launcher", "openmpi", "--launcher_args", "--mca btl ^openib", "--export", "X=a b", "train.py", *NASTY]
    (command,) = here.dry("-H", path, *words)["commands"]
    assert command[:5] == ["mpirun", "-n", "5", "--host", f"{A}:2,{B}:3"]
    end = ["--mca", "btl", "^openib", sys.executable, "-u", "train.py", *NASTY]
    assert command[-len(end) :] == end
    flags = command[5 : -len(end)]
    assert set(flags[::2]) == {"-x"}
    cli.main(["-H", path, *words])
    ((program, argv, env),) = ran
    assert (program, argv) == ("mpirun", command)
    named = {name: env[name] for name in flags[1::2]}
    assert (named["X"], named["JZERO_HANG_TIMEOUT"], len(named["JZERO_SECRET"])) == ("a b", "0", 64)
    assert (named["MASTER_ADDR"], named["MASTER_PORT"]) == (A, "29500")
    assert named.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "CROSS_RANK", "CUDA_VISIBLE_DEVICES"} == set()


def test_the_version_and_a_path_that_cannot_be_used(capsys):
    assert cli.main(["--version"]) == cli.main(["run", "--version"]) == 0
    assert capsys.readouterr().out == f"jzero {jzero.__version__}\n" * 2
    for words in (["x" * 300], ["plot", "x" * 300]):
        assert cli.main(words) == 2
        assert re.fullmatch(r"jzero: .*x{99}.*: File name too long\n", capsys.readouterr().err)


def test_a_word_that_is_no_command(here, capsys):
    """A script of that name, a word that resembles no command, and an option of the launcher are none."""
    assert cli.main(["plots", "runs/a"]) == 2
    assert capsys.readouterr().err == "jzero: plots: no such script; did you mean `jzero plot`?\n"
    with pytest.raises(SystemExit):  # an abbreviation is no option
        cli.main(["--num_gpu", "2", "train.py"])
    assert "did you mean --num_gpus?" in capsys.readouterr().err
    (here.path / "plots").touch()
    own = [name for action in options.parser()._actions for name in action.option_strings]
    for script in ("plots", "plan.py", "train", *own):
        cli.check_name(script)


def test_a_launcher_that_is_not_installed(here, capsys):
    here.setenv("PATH", str(here.path))
    assert cli.main(["--launcher", "slurm", "--platform", "cpu", "train.py"]) == 2
    assert capsys.readouterr().err == "jzero: --launcher slurm: there is no srun on this machine\n"


def found_in(here, env, export=()):
    """The variables of a shell that go along to other hosts."""
    return propagated(env, str(here.path), str(here.path / "home"), export)


def test_what_goes_along(here):
    along = ["NCCL_DEBUG", "PYTHONHASHSEED", "MV2_X", "UCX_TLS", "MLFLOW_RUN", "JAX_PLATFORMS", "JZERO_TIMEOUT",
             "XLA_FLAGS", "TF_X", "CUDA_HOME", "HF_HOME", "WANDB_MODE", "PATH", "LD_LIBRARY_PATH",
             "VIRTUAL_ENV"]  # fmt: skip
    alone = ["CUDA_VISIBLE_DEVICES", "JZERO_JOB_ID", "JZERO_PROGRESS", "HOME", "HOSTNAME", "MY_JAX_X", "PATHS", "RANK"]
    found = found_in(here, {name: "x" for name in along + alone})
    assert found == {**{name: "x" for name in along}, "PYTHONPATH": str(here.path)}
    assert found_in(here, {"PYTHONPATH": f"/a::{here.path}:/a"})["PYTHONPATH"] == f"{here.path}:/a"


def test_files(here):
    """The order is: shell, .deepspeed_env, .jzero_env (each at home, then here), --export; for all processes."""
    home = ["# of all jobs", "", "A=1", "B=1", "C=1", "  D=a b=$c # not a comment  ", "E="]
    here.write("home/.deepspeed_env", *home)
    here.write(".deepspeed_env", "B=2", "C=2", "NCCL_X=2", "export F='quoted'", "   ", "\t# G=1")
    here.write("home/.jzero_env", "C=3", "H=3")
    here.write(".jzero_env", "H=4")
    shell = {"NCCL_X": "shell", "A": "not passed on"}
    expected = {
        "A": "1", "B": "2", "C": "3", "D": "a b=$c # not a comment", "E": "", "F": "'quoted'", "H": "4", "NCCL_X": "2",
        "PYTHONPATH": str(here.path),
    }  # fmt: skip
    assert found_in(here, shell) == expected
    assert found_in(here, shell, ["I=a=b", "H=5"]) == expected | {"I": "a=b", "H": "5"}
    assert found_in(here, shell, ["NCCL_X"])["NCCL_X"] == "shell"
    for process in here.dry("--platform", "cpu", "--num_gpus", 2, "train.py")["processes"]:
        assert {name: process["env"][name] for name in "ABCDEFH"} == {name: expected[name] for name in "ABCDEFH"}
        assert process["env"]["PYTHONPATH"].split(":")[0] == str(here.path)
    here.write("home/mine", "A=0")
    assert found_in(here, {"DS_ENV_FILE": "mine"}).keys() == {"A", "C", "H", "PYTHONPATH"}


def test_all_bad_lines_at_once(here):
    first = here.write("mine", "A=1", "A 1", "", "=x")  # by its path
    second = here.write(".jzero_env", "A-B=1", "CUDA_VISIBLE_DEVICES=0")
    with pytest.raises(ConfigError) as error:
        found_in(here, {"DS_ENV_FILE": first}, ["=1", "MISSING", "CUDA_VISIBLE_DEVICES=1", "OK=1", "A-B=1"])
    form, include = "must be NAME=VALUE, or a comment after #", "use --include"
    expected = [
        (f"{first}, line 2: 'A 1'", form), (f"{first}, line 4: '=x'", form), (f"{second}, line 1: 'A-B=1'", form),
        (f"{second}, line 2: 'CUDA_VISIBLE_DEVICES=0'", include), ("--export = '=1'", "must be NAME or NAME=VALUE"),
        ("--export = 'MISSING'", "write MISSING=VALUE"), ("--export = 'CUDA_VISIBLE_DEVICES=1'", include),
        ("--export = 'A-B=1'", "must be NAME or NAME=VALUE"),
    ]  # fmt: skip
    for problem, (place, why) in zip(error.value.problems, expected, strict=True):
        assert problem.startswith(f"{place}: ")
        assert why in problem


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
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_imports_load_no_third_party_module_and_start_no_backend(tmp_path):
    """Nor what only some calls of an engine use: `jzero.initialize` took 0.5 s of 2.7 s for these.

    No import starts a backend: a process can still fork or configure its devices.
    """
    (tmp_path / "hosts").write_text(f"{A} slots=2\n{B} slots=2\n")
    (tmp_path / "train.py").write_text("")
    code = """
from jzero import cli
found = {}
for name, words in json.loads(sys.argv[1]).items():
    with contextlib.suppress(SystemExit):
        cli.main(words)
    found[name] = third()
for name in [name for name in sys.modules if name.partition(".")[0] == "jzero"]:
    del sys.modules[name]
import jzero
jzero.initialize, jzero.from_flax
rooms, then = sorted({name.split(".")[1] for name in sys.modules if name.startswith("jzero.")}), third()
import jzero.config, jzero.planner, models.llama, models.mlp
import jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
assert jax.device_count() == 3
print("", json.dumps([found, rooms, then]))
"""
    (found, rooms, then), errors = python(code, json.dumps(ANSWERS), folder=tmp_path)
    others = {name: [one for one in names if "cython" not in one] for name, names in found.items()}  # PyYAML's own
    assert others == {**{name: [] for name in ANSWERS}, "k8s": ["yaml"]}
    said = [line for line in errors.splitlines() if not is_noise(line)]
    assert said == ["jzero: --hostfile = nowhere: no such file"]
    assert "run" in rooms  # rooms that a run does not need make its start longer
    assert not set(rooms) & {"deepspeed", "launcher", "recipes", "plots", "models"}
    assert "jax" in then
    # Checkpoints, traces of layers and exports import what they need, when they do.
    assert not {"orbax", "tensorstore", "scipy", "grain", "matplotlib", "torch"} & set(then)


def test_a_job_s_command_does_not_import_jax(tmp_path):
    """The command starts a job faster, and uses less memory beside the processes that it waits for."""
    (tmp_path / "source").write_text("export SEEN=sourced")
    options = ["--platform", "cpu", "--venv_script", "./source", "--no_python", "--no_local_rank"]
    code = "atexit.register(lambda: print('', json.dumps(third())))\nrunpy.run_module('jzero', run_name='__main__')"
    found, errors = python(code, *options, "sh", "-c", "echo $SEEN $JZERO_JOB_ID > said", folder=tmp_path)
    assert not {"jax", "jaxlib", "numpy", "pydantic"} & set(found)
    assert (tmp_path / "said").read_text().startswith("sourced "), errors
