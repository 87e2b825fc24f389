import json
import os
import signal

import pytest
import yaml
from jobs import WORKER, Command

from jzero import cli

# A background job of a shell ignores Ctrl-C, and the commands that these tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start(tmp_path):
    """Start a job, with a program as its worker.py; kill what is left of it after the test."""
    commands = []

    def start(*arguments, program=None, **keywords):
        if program:
            (tmp_path / "worker.py").write_text(program)
        commands.append(Command(*arguments, cwd=tmp_path, **keywords))
        return commands[-1]

    yield start
    for command in commands:
        command.end()


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path.name


class Here:
    """A folder with a script `train.py`, without a hostfile and without CUDA_VISIBLE_DEVICES."""

    def __init__(self, tmp_path, monkeypatch, capsys):
        self.path, self.capsys, self.setenv = tmp_path, capsys, monkeypatch.setenv
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("jzero.launcher.job.HOSTFILE", str(tmp_path / "none"))
        for name in [*os.environ]:
            if name.startswith(("CUDA_", "DS_", "JZERO_")):
                monkeypatch.delenv(name)
        (tmp_path / "home").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        (tmp_path / "train.py").write_text("")

    def write(self, name, *lines):
        (self.path / name).write_text("".join(f"{line}\n" for line in lines))
        return str(self.path / name)

    def hosts(self, *lines):
        return self.write("hosts", *lines)

    def printed(self, *words):
        assert cli.main(["--dry_run", *map(str, words)]) == 0
        out, err = self.capsys.readouterr()
        assert err == ""
        return out

    def dry(self, *words):
        return json.loads(self.printed(*words))

    def manifest(self, *words):
        """Return the manifest for Kubernetes and the specification of its pods."""
        manifest = yaml.safe_load(self.printed("--launcher", "k8s", *words))
        return manifest, manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]

    def refused(self, *words):
        assert cli.main(["--dry_run", *map(str, words)]) == 2
        out, err = self.capsys.readouterr()
        assert out == ""
        assert err.startswith("jzero: ")
        return err


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    return Here(tmp_path, monkeypatch, capsys)
