"""The plan: the options, the ranks, environment and devices that `--dry_run` prints, and the secrets that it masks."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from golden import snapshots
from helpers.stored_cases import check_cases
from planning import A, B

from jzero import cli
from jzero.config import Config
from jzero.distributed.place import host_fault
from jzero.errors import ConfigError
from jzero.launcher import kubernetes, options
from jzero.launcher.job import make_job
from jzero.launcher.transports import BOOT


def test_options_are_frozen(pytestconfig):
    found = {" ".join(a.option_strings): a.default for a in options.parser()._actions if a.option_strings}
    snapshots.check("options.json", found, pytestconfig.getoption("--update-golden"))
    assert options.LAUNCHERS == ("ssh", "slurm", "openmpi", "k8s")


def test_what_follows_the_script_is_its_own(capsys):
    """Options of the launcher among it earn a warning."""
    words = ["-i", "x", "--", "--master_port", "1", "--num_gpus=4", "--lr=2", "two words", "", "-", "--help", "--num"]
    parsed = options.parse(["--num_gpus", "2", "train.py", *words])
    assert (parsed.script, parsed.script_args, parsed.num_gpus, parsed.include) == ("train.py", words, 2, "")
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in warnings] == ["--master_port", "--num_gpus=4"]
    assert all("goes to the script" in line and line.endswith("write it before train.py") for line in warnings)


ENV = re.compile("(WORLD|LOCAL|CROSS)_SIZE|(LOCAL_|CROSS_)?RANK|MASTER_|CUDA_VISIBLE|JAX_(PLATF|NUM)|JZERO_HEARTBEAT_S")


def test_what_a_command_plans(here, pytestconfig, monkeypatch):
    """Ranks are node-major in the order of the hostfile; CUDA_VISIBLE_DEVICES is this machine's alone."""

    def outcome(case):
        path = here.hosts(*case.get("hosts", ["a slots=1"]))
        words = [*(["-H", path] if "hosts" in case and "default" not in case else []), *case["words"]]
        with monkeypatch.context() as patch:
            patch.setattr("jzero.launcher.job.HOSTFILE", path if "default" in case else "none")
            patch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
            for name, value in {"JAX_PLATFORMS": "cuda", **case.get("env", {})}.items():
                patch.setenv(name, value)
            plan = here.dry(*words)
        kept = {"host", "rank", "local_rank", "device_ids"}
        processes = [{name: one[name] for name in one if name in kept} | one["env"] for one in plan["processes"]]
        plan["processes"] = [{k: v for k, v in one.items() if k in kept or ENV.match(k)} for one in processes]
        shown = json.dumps({name: plan[name] for name in ("hosts", "coordinator", "processes", "commands")})
        names = {shlex.quote(BOOT): "BOOT", BOOT: "BOOT", sys.executable: "PYTHON", str(here.path): "HERE"}
        for text, name in names.items():
            shown = shown.replace(json.dumps(text)[1:-1], name)
        return json.loads(shown)

    check_cases(Path(__file__).with_name("plans.jsonl"), outcome, pytestconfig)
    plan = here.printed("--platform=cpu", "train.py", "run")
    assert cli.main(["run", "--dry_run", "--platform=cpu", "train.py", "run"]) == 0  # a word for the same
    assert here.capsys.readouterr().out == plan


def test_refused(here, pytestconfig):
    """With --no_ssh one device too few is an error already: the other hosts would number ranks differently."""

    def outcome(case):
        here.setenv("CUDA_VISIBLE_DEVICES", case["visible"])
        return here.refused(*case["words"], "train.py").strip().replace(str(here.path), "HERE")

    here.write("two", f"{A} slots=2", "localhost slots=2")
    here.write("uneven", f"{A} slots=1", f"{B} slots=2")
    check_cases(Path(__file__).with_name("refused.jsonl"), outcome, pytestconfig)


NAMES = ["WANDB_API_KEY", "HF_TOKEN", "NCCL_SECRET", "MLFLOW_TRACKING_PASSWORD", "TF_CREDENTIALS", "NCCL_my_key"]
SECRET = "hunter2"


@pytest.fixture
def secrets(here, monkeypatch):
    for name in [*NAMES, "JZERO_SECRET"]:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi", "k8s"])
def test_no_secret_is_in_a_plan(here, launcher):
    """Arguments are shown as they are: a masked one would suggest that command lines keep secrets."""
    exported = f"--export=MY_PASSWORD={SECRET}", "--export=NCCL_DEBUG"
    words = ["--platform=cpu", *exported, "train.py", "--api_key", "shown"]
    if launcher == "k8s":
        manifest, pod = here.manifest("--launcher_args=image=i", "--num_nodes=1", "--num_gpus=1", *words)
        env = {v["name"]: v["value"] for v in pod["containers"][0]["env"]}
        assert env == {"MY_PASSWORD": "***", "NCCL_DEBUG": "INFO"}
        text = json.dumps(manifest)
    else:
        plan = here.dry(f"--launcher={launcher}", "--hostfile", here.hosts("localhost slots=1"), *words)
        env = plan["processes"][0]["env"]
        assert {name: env[name] for name in [*NAMES, "MY_PASSWORD"]} == dict.fromkeys([*NAMES, "MY_PASSWORD"], "***")
        assert env["NCCL_DEBUG"] == "INFO"
        text = json.dumps(plan)
    assert SECRET not in text
    assert "shown" in text


@pytest.mark.usefixtures("secrets")
def test_processes_get_the_secrets(here):
    words = ["--platform=cpu", "--launcher_args=image=i", f"--export=MY_PASSWORD={SECRET}", "train.py"]
    env = {name: SECRET for name in NAMES} | {"HOME": str(here.path)}
    job = make_job(options.parse(words), env, str(here.path))
    assert {job.processes[0].env[name] for name in NAMES} == {SECRET}
    assert SECRET in json.dumps(kubernetes.jobset(job, job.processes[0].env))


@pytest.mark.usefixtures("secrets")
def test_no_secret_is_in_an_error(here):
    for line in (f"WANDB_API_KEY: {SECRET}", f"export JZERO_JOB_ID=TOKEN{SECRET}"):
        here.write(".jzero_env", line)
        assert SECRET not in here.refused("--platform=cpu", "train.py")
    (here.path / ".jzero_env").unlink()
    for name in ("API-KEY", "JZERO_SECRET"):
        said = here.refused("--platform=cpu", f"--export={name}={SECRET}", "train.py")
        assert SECRET not in said
    assert "export JZERO_SECRET" in said
    for config in (
        {"wandb": [{"api_key": SECRET}]}, {"optimizer": {"type": "Adam", "params": {"api_key": SECRET}}},
        {"compiler_options": {"api_key": [SECRET]}}, {"comet": {"api_key": SECRET, "token": SECRET}},
        {"API_KEY": SECRET}, {"secret": {"seed": 1}},
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            Config.load(config)
        assert SECRET not in str(error.value)
    assert '{"seed": 1}' in str(error.value)  # only texts are masked


HOST_NAMES = {
    "worker..1": "must have 1 to 63 characters between its dots",
    f"{'a' * 64}.com": "must have 1 to 63 characters between its dots",
    "root@-v": "cannot begin with -",
    "a\x00b": "must have 1 to 253 characters, without spaces and control characters",
    "a." * 127: "must have 1 to 253 characters, without spaces and control characters",
}


def test_a_host_name_that_cannot_be_encoded(here):
    """It is refused in one line wherever it is written; others are allowed."""
    cpu = ["--platform", "cpu"]
    good = here.write("good", f"{A} slots=1", "localhost slots=1")
    for name, why in HOST_NAMES.items():
        path = here.hosts("localhost slots=1", f"{name} slots=1")
        options = [["-H", path], *(["-H", good, f"{option}={name}"] for option in ("-i", "--master_addr"))]
        if "\x00" not in name:  # no environment holds it
            here.setenv("SLURM_JOB_NODELIST", name)
            options.append(["--num_gpus", 1])
        for words in options:
            message = here.refused(*cpu, *words, "train.py")
            assert f"a host's name {why}" in message
            assert message.count("\n") == 1
    names = ["worker-1", "root@gpu.example.com", "10.0.0.1", "fe80::1%eth0", "a.b.", "é", "a_b"]
    assert [host_fault(name) for name in names] == [""] * len(names)
