"""A checkpoint directory has one writer; the others learn who it is, and a dead writer's lock is taken over."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest
from helpers.refusals import refuses
from layouts import LAYOUTS, build

import jzero
from jzero.checkpoint import async_save, lock

ROOT = Path(__file__).parents[2]
# Without JAX, so that a process starts in 0.1 s: the module alone.
JOB = f"""
import importlib.util, os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
spec = importlib.util.spec_from_file_location("lock", {str(ROOT / "jzero" / "checkpoint" / "lock.py")!r})
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
lock.POLL, lock.REFRESH = 0.02, float(os.environ.get("REFRESH", 0.2))
lock.STALE, lock.SETTLE = float(os.environ.get("STALE", 2)), float(os.environ.get("SETTLE", 0.1))
directory = Path(sys.argv[1])

def attempt():
    try:
        lock.hold(directory)
        return "held"
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
"""


@pytest.fixture
def job(tmp_path):
    """Start a program with `attempt()`; its standard output is a pipe."""
    started = []

    def start(program="print(attempt(), flush=True)\ninput()", **env):
        script = tmp_path / str(len(started)) / "train.py"  # the job before may not have read its own yet
        script.parent.mkdir()
        script.write_text(JOB + program)
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "JZERO"))}
        pipe = subprocess.PIPE
        command = [sys.executable, "-S", script, tmp_path / "runs"]
        started.append(subprocess.Popen(command, env=own | env, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process):
    return process.stdout.readline().strip()


def holder(job, *program, **env):
    """A job that holds the directory."""
    process = job(*program, **env)
    assert said(process) == "held"
    return process


def held_by(tmp_path):
    return json.loads((tmp_path / "runs" / ".lock").read_text())["pid"]


def change(tmp_path, **fields):
    file = tmp_path / "runs" / ".lock"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_the_second_job_is_told_and_a_dead_one_is_replaced(tmp_path, job):
    first = holder(job, SLURM_JOB_ID="12", JZERO_JOB_ID="cafe")
    second = job()
    runs = re.escape(f"{tmp_path}/runs")
    words = rf"ConfigError: {runs} is in use by Slurm job 12, job cafe of train.py \(process {first.pid} on "
    assert re.match(rf"{words}.*since \d{{4}}-.*if it has ended, remove {runs}/.lock to take over$", said(second))
    first.kill()  # it stays a zombie until this test waits for it
    _, errors = holder(job, STALE="600").communicate("\n")  # ends normally
    assert "waiting" not in errors
    assert [*(tmp_path / "runs").iterdir()] == []


def test_a_child_that_ends_keeps_its_parents_lock(tmp_path, job):
    parent = job("print(attempt(), flush=True)\nos.fork() or sys.exit()\nos.wait()\nprint('', flush=True)\ninput()")
    assert (said(parent), said(parent)) == ("held", "")
    assert held_by(tmp_path) == parent.pid


def test_a_pid_that_another_process_has_now(tmp_path, job):
    holder(job)
    change(tmp_path, started="1", id="before")
    second = holder(job)
    assert held_by(tmp_path) == second.pid


def test_an_owner_on_another_host(tmp_path, job):
    """Alive while the file changes; dead after STALE seconds; one that wakes up then writes no more."""
    first = holder(job, "print(attempt(), flush=True)\ninput()\nlock.check_lock(directory)")
    change(tmp_path, place="another boot", host="node7")
    second = job(STALE="60")
    assert "(process" in (words := said(second)), words
    assert "on node7, since" in words
    first.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    third = holder(job, STALE="0.5")
    assert time.monotonic() - begin > 0.5
    first.send_signal(signal.SIGCONT)
    _, errors = first.communicate("\n")
    assert f"CheckpointError: {tmp_path}/runs is in use by a job of train.py (process {third.pid} on" in errors
    assert held_by(tmp_path) == third.pid  # the first did not delete it when it exited
    _, errors = third.communicate("\n")
    assert "names a job of train.py (process" in errors
    assert "waiting 0.5 s to see whether it still runs" in errors


SLURM = {"SLURM_JOB_ID": "12"}


@pytest.mark.parametrize(
    ("before", "now", "held"),
    [
        ({"JZERO_ATTEMPT": "cafe 0"}, {"JZERO_ATTEMPT": "cafe 1"}, True),
        ({"JZERO_ATTEMPT": "cafe 1"}, {"JZERO_ATTEMPT": "cafe 1"}, False),
        ({"JZERO_ATTEMPT": "cafe 0"}, {"JZERO_ATTEMPT": "face 1"}, False),
        (SLURM, SLURM | {"SLURM_RESTART_COUNT": "1"}, True),
        (SLURM, SLURM, False),
    ],
)
def test_a_later_attempt_of_the_same_job_takes_over(tmp_path, job, before, now, held):
    """At once, and though the process of the earlier one still runs on a host that nobody reaches."""
    first = holder(job, REFRESH="0.001", **before)
    begin = time.monotonic()
    second = job(STALE="60", **now)
    assert (said(second) == "held") == held
    assert time.monotonic() - begin < 60
    assert held_by(tmp_path) == (second if held else first).pid


def test_one_of_many_takes_a_dead_owners_lock(tmp_path, job):
    holder(job).kill()
    several = [job("input()\nprint(attempt(), flush=True)\ninput()", SETTLE="1.5") for _ in range(6)]
    for process in several:
        process.stdin.write("\n")
        process.stdin.flush()
    words = [said(process) for process in several]
    (winner,) = [p for p, text in zip(several, words, strict=True) if text == "held"]
    assert held_by(tmp_path) == winner.pid
    assert sum("is in use by a job of train.py" in text for text in words) == 5, words


def test_other_things_in_the_place_of_the_lock(tmp_path, job):
    """An empty file, as of a job killed while it wrote it, is taken over; a directory or a link is an error."""
    (tmp_path / "runs").mkdir()
    file = tmp_path / "runs" / ".lock"
    process = job("while True:\n    input()\n    print(attempt(), flush=True)", STALE="0.05", SETTLE="0.01")
    texts = "", "{", '{"id": 3, "attempts": []}', "[" * 9000
    cases = [(partial(file.write_text, text), "held") for text in texts]
    cases += [(file.mkdir, "Is a directory"), (partial(file.symlink_to, "/etc/passwd"), "symbolic links")]
    for make, words in cases:
        make()
        process.stdin.write("\n")
        process.stdin.flush()
        assert words in said(process)
        file.rmdir() if file.is_dir() else file.unlink()


def test_saves_of_two_jobs(tmp_path, job, capfd):
    """The second job's save is an error before it touches anything; reading needs no lock."""
    runs, first = tmp_path / "runs", holder(job)
    words = rf"runs is in use by a job of train\.py \(process {first.pid} on"
    refuses(lambda: jzero.checkpoint.save({"x": jnp.ones(9)}, runs, "a"), words)
    refuses(lambda: build(LAYOUTS["one"], resume=runs), "is in use by")
    build(LAYOUTS["one"], checkpoint={"dir": str(runs)})
    assert f"saving to checkpoint.dir may fail while {runs} is in use by" in capfd.readouterr().err
    assert [path.name for path in runs.iterdir()] == [".lock"]
    first.kill()
    first.wait()
    assert lock.other_holder(runs) == ""
    jzero.checkpoint.save({"x": jnp.ones(9)}, runs, "a").wait()
    assert {path.name for path in runs.iterdir()} == {".lock", "a", "latest"}


def test_a_save_that_lost_its_lock_is_not_completed(tmp_path, monkeypatch):
    """As that of a process which was suspended for so long that another job took over."""
    jzero.checkpoint.save({"x": jnp.ones(9)}, tmp_path, "a").wait()
    before, shared = json.loads((tmp_path / ".lock").read_text()), async_save._check_shared

    def suspended(draft):
        (tmp_path / ".lock").write_text(json.dumps(before | {"id": "other", "pid": 1, "started": "2"}))
        shared(draft)

    monkeypatch.setattr(async_save, "_check_shared", suspended)
    under_way = jzero.checkpoint.save({"x": jnp.zeros(9)}, tmp_path, "a")
    with pytest.raises(jzero.CheckpointError, match=r"a was not written: .* is in use by .*\(process 1 on"):
        under_way.wait()
    monkeypatch.undo()
    jzero.checkpoint.save({"x": jnp.ones(9)}, tmp_path, "b").wait()  # the other one has ended
    assert json.loads((tmp_path / ".lock").read_text())["id"] == before["id"] == lock._ID
