"""Secrets are masked in what jzero prints: the plan, the manifest, errors."""

import json

import pytest

from jzero import cli
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.launcher import kubernetes, options
from jzero.launcher.job import make_job

NAMES = ["WANDB_API_KEY", "HF_TOKEN", "NCCL_SECRET", "MLFLOW_TRACKING_PASSWORD", "TF_CREDENTIALS", "NCCL_my_key"]
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def secrets(here, monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi", "k8s"])
def test_plan(here, launcher):
    words = ["--platform=cpu", "--num_gpus=1", f"--export=MY_PASSWORD={SECRET}", "--export=NCCL_DEBUG", "train.py"]
    if launcher == "k8s":
        manifest, pod = here.manifest("--launcher_args=image=i", "--num_nodes=1", *words)
        env = {v["name"]: v["value"] for v in pod["containers"][0]["env"]}
        assert env == {"MY_PASSWORD": "***", "NCCL_DEBUG": "INFO"}
        assert SECRET not in json.dumps(manifest)
        return
    if launcher != "ssh":
        words = [f"--launcher={launcher}", "--hostfile", here.hosts("a slots=1"), *words]
    plan = here.dry(*words)
    env = plan["processes"][0]["env"]
    assert {name: env[name] for name in [*NAMES, "MY_PASSWORD"]} == dict.fromkeys([*NAMES, "MY_PASSWORD"], "***")
    assert env["NCCL_DEBUG"] == "INFO"
    assert SECRET not in json.dumps(plan)


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi", "k8s"])
def test_arguments_are_shown_as_they_are(here, launcher):
    """As the documentation warns: a masked argument would suggest that command lines keep secrets."""
    words = ["--platform=cpu", "--hostfile", here.hosts("a slots=1"), "--launcher", launcher, "--launcher_args=image=i"]
    assert SECRET in here.printed(*words, "train.py", "--api_key", SECRET)


def test_processes_get_the_values(here):
    words = ["--platform=cpu", "--launcher_args=image=i", f"--export=MY_PASSWORD={SECRET}", "train.py"]
    env = {name: SECRET for name in NAMES} | {"HOME": str(here.path)}
    job = make_job(options.parse(words), env, str(here.path))
    assert {job.processes[0].env[name] for name in NAMES} == {SECRET}
    assert SECRET in json.dumps(kubernetes.jobset(job, job.processes[0].env))


def test_errors(here):
    for line in (f"WANDB_API_KEY: {SECRET}", f"export JZERO_JOB_ID=TOKEN{SECRET}"):
        here.write(".jzero_env", line)
        assert SECRET not in here.refused("--platform=cpu", "train.py")
    (here.path / ".jzero_env").unlink()
    assert SECRET not in here.refused("--platform=cpu", f"--export=API-KEY={SECRET}", "train.py")
    assert SECRET not in here.refused("--platform=cpu", f"--export=JZERO_SECRET={SECRET}", "train.py")
    for config in (
        {"wandb": [{"api_key": SECRET}]}, {"optimizer": {"type": "Adam", "params": {"api_key": SECRET}}},
        {"compiler_options": {"api_key": [SECRET]}}, {"comet": {"api_key": SECRET, "token": SECRET}},
        {"API_KEY": SECRET}, {"secret": {"seed": 1}},
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            Config.load(config)
        assert SECRET not in str(error.value)
    assert '{"seed": 1}' in str(error.value)  # only texts are masked
    assert cli.main(["--dry_run", "--platform=cpu", "train.py"]) == 0
