"""Secrets are masked in what jzero prints: the plan, the manifest, errors."""

import json

import pytest

from jzero.config import Config
from jzero.errors import ConfigError
from jzero.launcher import kubernetes, options
from jzero.launcher.job import make_job

NAMES = ["WANDB_API_KEY", "HF_TOKEN", "NCCL_SECRET", "MLFLOW_TRACKING_PASSWORD", "TF_CREDENTIALS", "NCCL_my_key"]
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def secrets(here, monkeypatch):
    for name in [*NAMES, "JZERO_SECRET"]:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi", "k8s"])
def test_plan(here, launcher):
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
