"""Checkpoints on disks that are full, vanish or cannot be written: the error names the reason, nothing is lost."""

import asyncio
import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.checkpoints import ROWS, assert_read, assert_saves, nothing_left_over, state  # noqa: F401

import jzero
from jzero.checkpoint import Checkpoint, async_save, orbax_trees, save
from jzero.checkpoint.async_save import Presence


def test_a_full_disk(small_disk, capfd):
    saved = state()
    save(saved, small_disk, "a").wait()
    large = saved | {"large": jax.device_put(np.ones((ROWS, 1 << 16), np.float32), saved["zeros"].sharding)}
    under_way = save(large, small_disk, "a")
    with pytest.raises(jzero.CheckpointError, match=r"disk/a was not written: .*No space left on device") as error:
        under_way.wait()
    assert str(error.value) in capfd.readouterr().err
    assert_read(small_disk, saved)  # the previous one of the same tag
    save(saved, small_disk, "b").wait()  # the failed draft was deleted
    save(large, small_disk, "b")
    words = r"disk/b was not written: .*No space left.*The next checkpoint, .*disk/c, is being written"
    with pytest.raises(jzero.CheckpointError, match=words):  # which nobody has waited for
        save(saved, small_disk, "c")
    jzero.checkpoint.wait()
    assert_read(small_disk, saved)


PROGRAM = """
import os, sys
import jax.numpy as jnp, jzero, orbax.checkpoint
for number, end in enumerate(ENDS):
    if pid := os.fork():  # before JAX has threads
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        continue
    os.dup2(os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT), 2)
    jzero.checkpoint.save({"x": jnp.ones(1 << 20)}, DISK if number == 0 else f"runs{number}", "a")
    exec(end)
    break
"""


def test_a_program_ends_when_its_save_is_complete(small_disk, tmp_path):
    """Also after an exception; if its last save failed, with an error in one line."""
    ends = ["", "raise ValueError"]
    script = tmp_path / "script.py"
    script.write_text(f"ENDS, DISK = {ends!r}, {str(small_disk)!r}\n{PROGRAM}")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    texts = [(tmp_path / f"{number}.txt").read_text() for number in range(len(ends))]
    (line,) = [x for x in texts[0].splitlines() if "InitializeLog" not in x and "cudart" not in x]  # JAX's start
    assert line.startswith(f"jzero: checkpoint {small_disk}/a was not written: ")
    if (3, 12) <= sys.version_info < (3, 12, 2):
        assert line.endswith("at the script's end)")
        return
    assert line.endswith("No space left on device")
    assert done.stdout.split() == ["1", "1"], texts
    assert Checkpoint.find(tmp_path / "runs1").shapes == {"x": (1 << 20,)}


@pytest.mark.parametrize("moment", ["_check_shared", "Presence", "save", "finalize", "commit"])
def test_a_directory_that_vanishes(tmp_path, monkeypatch, moment):
    """TensorStore makes it again, so a save after that is not complete."""
    owner = ocp.PyTreeCheckpointHandler if moment in ("save", "finalize") else async_save
    before, runs = getattr(owner, moment), tmp_path / "runs"

    def vanishing(*args, **keywords):
        shutil.rmtree(runs)
        return before(*args, **keywords)

    if moment == "_check_shared":
        monkeypatch.setattr(before, "__defaults__", (0.2,))
    monkeypatch.setattr(owner, moment, vanishing)
    with pytest.raises(
        jzero.CheckpointError, match=rf"a was not written: {runs}(/a\.saving)? vanished during the save:"
    ):
        save(state(), runs, "a").wait()
    monkeypatch.undo()
    assert not (runs / "a").exists()
    assert_saves(runs)


def closed(self):
    os.close(self._descriptor)
    raise OSError(errno.ENOSPC, "No space left on device")


def dying(*_):
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit("the thread dies")


def limited(self, start=threading.Thread.start):
    if self.name == "jzero checkpoint":
        raise RuntimeError("can't start new thread")
    start(self)


FULL = r"was not written: .*No space left on device"


@pytest.mark.parametrize(
    ("owner", "name", "fault", "words"),
    [
        (Presence, "check", closed, FULL),
        (Presence, "close", dying, r"SystemExit: the thread dies"),
        (ocp.PyTreeCheckpointHandler, "finalize", dying, r"SystemExit: the thread dies"),
        (async_save, "import_orbax", dying, r"SystemExit: the thread dies"),
        (threading.Thread, "start", limited, FULL),
    ],
)
def test_a_save_whose_thread_dies(small_disk, monkeypatch, capfd, owner, name, fault, words):
    """Whatever ends the thread, and wherever: `wait` raises, because nobody else learns of it."""
    large = {"large": jnp.ones(1 << 20)} if fault is not dying else {"small": jnp.ones(8)}
    monkeypatch.setattr(owner, name, fault)
    under_way = save(large, small_disk, "a")
    with pytest.raises(jzero.CheckpointError, match=words) as error:
        under_way.wait()
    assert str(error.value) in capfd.readouterr().err
    assert "failed" in repr(under_way)
    monkeypatch.undo()
    assert not (small_disk / "a.saving").exists()
    assert_saves(small_disk)


def test_a_rename_that_copies(tmp_path, monkeypatch):
    """Some bucket mounts rename a directory by copying it: it is then another directory, and complete."""
    rename = os.replace

    def copying(old, new):
        if not Path(old).is_dir():
            return rename(old, new)
        shutil.copytree(old, new)
        shutil.rmtree(old)

    monkeypatch.setattr(os, "replace", copying)
    assert_saves(tmp_path / "runs")


@pytest.mark.parametrize(("place", "words"), [("file/below", "Not a directory"), ("/proc/none", "cannot be written")])
def test_a_place_that_cannot_be_written(tmp_path, place, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(jzero.CheckpointError, match=words):
        save(state(), tmp_path / place, "a")


ORBAX = "/site-packages/orbax/checkpoint/_src/write.py"
TOLD = 'RESOURCE_EXHAUSTED: Error writing "l25/0" in OCDBT database at local file "/runs/a.saving/"'


@pytest.mark.parametrize(("file", "logged"), [(ORBAX, []), ("/mine.py", ["asyncio"])])
def test_futures_that_orbax_abandons_are_not_logged(caplog, file, logged):
    """At a full disk it gathers writes, and leaves the loop at the first error."""
    orbax_trees.import_orbax()
    made = {}
    exec(compile("async def write():\n    raise ValueError('No space left on device')", file, "exec"), made)

    async def leave():
        asyncio.get_running_loop().create_future().set_exception(ValueError(TOLD))
        writes = asyncio.gather(made["write"](), made["write"]())
        await asyncio.sleep(0.01)
        assert writes.done()

    asyncio.run(leave())
    gc.collect()
    assert [record.name for record in caplog.records if "was never retrieved" in record.getMessage()] == logged
