"""Plans for tests: the output of `--dry_run` in a folder of its own, for hosts that are not this machine."""

import json
import os

import yaml

from jzero import cli

A, B, C = (f"198.51.100.{i}" for i in (1, 2, 3))  # reserved for documentation (RFC 5737), so no machine has them


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
