"""Files with names that others know in advance: no link is followed, no fifo blocks, the folder is private."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jzero
from jzero.checkpoint.directory import write_atomically
from jzero.cli import pid_file
from jzero.data import write_tokens
from jzero.distributed import heartbeat
from jzero.files import create

ROOT = Path(__file__).parents[2]


class Letters:
    vocab_size, end = 128, 0

    def encode(self, text):
        return list(text.encode())


def latest(folder):
    write_atomically(folder / "latest", "global_step3")
    return folder / "latest"


def progress(folder):
    heartbeat.write(str(folder / "latest"), "3 4")
    return folder / "latest"


def tokens(folder):
    write_tokens(["abc"], folder / "latest.npy", Letters())
    return folder / "latest.npy"


WRITERS = [(latest, "latest.new"), (progress, "latest.new"), (tokens, "latest.unfinished")]


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_no_link_is_followed(write, name, tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    folder.mkdir()
    victim.write_text("precious")
    for target in (victim, tmp_path / "nothing", folder):
        (folder / name).symlink_to(target)
        written = write(folder)
        assert written.stat().st_size
        assert not written.is_symlink()
        assert not (folder / name).is_symlink()
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared", "victim"]


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_no_fifo_blocks(write, name, tmp_path):
    os.mkfifo(tmp_path / name)
    written = write(tmp_path)
    assert stat.S_ISREG(written.stat().st_mode)
    found = np.load(written).tolist() if written.suffix else written.read_text()
    assert found == {latest: "global_step3", progress: "3 4", tokens: [97, 98, 99, 0]}[write]


def test_an_open_name_is_refused_rather_than_shared(tmp_path, monkeypatch):
    """Another user makes the link between the removal of the name and the opening."""
    (tmp_path / "victim").write_text("precious")
    monkeypatch.setattr(os, "unlink", lambda path: Path(path).symlink_to(tmp_path / "victim"))
    with pytest.raises(FileExistsError):
        create(tmp_path / "name")
    assert (tmp_path / "victim").read_text() == "precious"


def test_the_pid_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = tmp_path / f"{os.getpid()}.jzero"
    (tmp_path / "victim").write_text("precious")
    file.symlink_to(tmp_path / "victim")
    with pid_file():
        assert file.read_text() == f"{os.getpid()}\n"
        assert not file.is_symlink()
    assert not file.exists()
    assert (tmp_path / "victim").read_text() == "precious"
    file.mkdir()  # cannot be removed, as another user's file in /tmp cannot
    with pytest.raises(jzero.ConfigError, match=r"--save_pid: .*\.jzero: .*remove it"), pid_file():
        pass
    assert file.is_dir()


@pytest.mark.processes
def test_the_agents_folder_is_private(tmp_path):
    code = "import os; f = os.path.dirname(os.environ['JZERO_PROGRESS']); print(f, oct(os.stat(f).st_mode & 0o777))"
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-m", "jzero", "--platform=cpu", "--no_local_rank", "train.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    folder, mode = done.stdout.split()
    assert mode == "0o700"
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()
