"""Checkpoints of several real processes: any layout to any other, kills at any moment, SIGTERM, mistakes, bad disks."""

import contextlib
import json
import re
import signal
import time
from functools import cache
from pathlib import Path

import layouts as runs
import numpy as np
import pytest
from helpers.sampling import some
from jobs import CPU, QUICK, TRIED, Command, said

import jzero
from jzero import ledger

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 12
WORKER = """
import json, os, shutil, signal, sys, time
import jax, numpy as np
import jzero, layouts as runs
from jzero.checkpoint import async_save, reader

rank, (what, layout, directory) = jzero.get_rank(), sys.argv[2:5]
jax.config.update("jax_num_cpu_devices", 4 // jzero.get_world_size())
layout = runs.SHARED[layout]

def slow(name, words):
    # the second call prints `words` and blocks, unless the job was started again
    fast, calls = getattr(async_save, name), []
    def f(*args, **keywords):
        calls.append(name)
        if not os.path.exists("started again") and len(calls) == 2:
            print(words + "\\n", end="", flush=True)  # one write, so that other ranks' lines do not split it
            time.sleep(1000)
        return fast(*args, **keywords)
    setattr(async_save, name, f)
"""
TRAIN = f"""
if "SLOW" in os.environ:
    slow(*os.environ["SLOW"].split())
section = {{"dir": directory, "max_to_keep": 3}}
engine = runs.build(layout, resume="auto", training_data=runs.data(), checkpoint=section)
while engine.global_steps < {STEPS}:
    loss = float(engine.train_batch())
    print(f"step {{engine.global_steps}} {{loss.hex()}}\\n", end="", flush=True)
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint()
    time.sleep(float(os.environ.get("PACE", 0)))
jzero.checkpoint.wait()
"""


@pytest.fixture
def job(start):
    """Start a worker with a program: `job(program, ..., options=[...])`."""

    def job(program, *arguments, options=(), **env):
        return start(*CPU, 2, *options, "worker.py", *arguments, program=WORKER + TRIED + program, env=QUICK | env)

    return job


def losses(output, rank=0):
    """step -> loss; a step that ran twice must give the same loss."""
    found = {}
    for step, loss in re.findall(rf"^\[{rank}\] step (\d+) (\S+)$", output, re.M):
        assert found.setdefault(int(step), loss) == loss, f"step {step} gave {found[int(step)]} and {loss}"
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of an uninterrupted run, by layout."""

    @cache
    def run(layout):
        path = tmp_path_factory.mktemp("straight")
        (path / "worker.py").write_text(WORKER + TRAIN)
        done = Command(*CPU, 2, "worker.py", "train", layout, path / "runs", cwd=path, env=QUICK)
        found = losses(done.ended().output)
        assert list(found) == list(range(1, STEPS + 1))
        return found

    return run


LAYOUTS = """
for name, sources in json.loads(what).items():
    engine = runs.build(runs.SHARED[name])
    for source in sources:
        engine.load_checkpoint(directory, tag=source)
        engine.save_checkpoint(directory, tag=f"{name} from {source}", save_latest=False)
        print(json.dumps([name, source, [float(engine.train_batch(runs.batch(3 + i))) for i in range(5)]]), flush=True)
jzero.checkpoint.wait()
"""


def test_layouts_of_two_processes_and_of_one(job, tmp_path):
    """From one process's layouts to two processes' and back: 15 pairs, each way every layout and every pipeline."""
    names = list(runs.LAYOUTS)
    pairs = {shared: [names[(n + i) % 10] for n in (0, 5, 8)] for i, shared in enumerate(runs.SHARED)}
    engines = {name: runs.build(layout) for name, layout in runs.LAYOUTS.items()}
    for name, engine in engines.items():
        for step in range(3):
            engine.train_batch(runs.batch(step))
        engine.save_checkpoint(tmp_path / "runs", tag=name).wait()
    expected = [float(engine.train_batch(runs.batch(3 + step))) for step in range(5)]
    (tmp_path / "runs" / ".lock").unlink()  # this process holds the directory until it exits; the job takes it over
    done = job(LAYOUTS, json.dumps(pairs), "stage3 x 2", tmp_path / "runs").ended(seconds=300)
    said = [json.loads(line[4:]) for line in done.output.splitlines() if line.startswith('[0] ["')]
    assert {(name, source) for name, source, _ in said} == {(name, s) for name, chosen in pairs.items() for s in chosen}
    for number, (name, source, found) in enumerate(said):  # what two processes wrote is what one had written
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{source} -> {name}")
        back = list(engines.values())[number % len(engines)]
        back.load_checkpoint(tmp_path / "runs", tag=f"{name} from {source}")
        places = back.step_fn.state_shardings
        runs.assert_same(back.state, jzero.checkpoint.restore(tmp_path / "runs", places, tag=source))
        found = [float(back.train_batch(runs.batch(3 + step))) for step in range(5)]
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{name} -> {back}")


KILLS = [
    ("_check_shared writing", "stage3 x 2", [1]),
    ("commit committing", "pipe x 2", [0, 1]),
    ("commit committing", "stage3 x 2", [1]),  # rank 0 commits, a peer dies
]


@pytest.mark.parametrize(("moment", "layout", "victims"), some(KILLS, KILLS[:2]))
def test_a_killed_job_goes_on_by_itself(job, tmp_path, straight, moment, layout, victims):
    """While arrays are written, or before the rename; the ledger has one curve, and the time that the kill cost."""
    directory = tmp_path / "runs"
    running = job(TRAIN, "train", layout, directory, options=["--max_restarts", 1], SLOW=moment, PACE="0.2")
    running.until(moment.split()[1])
    (tmp_path / "started again").touch()
    for pid in [running.rank(rank) for rank in victims]:
        with contextlib.suppress(ProcessLookupError):  # it ended with the other process
            running.kill(pid)
    running.ended().gone()
    assert "restart 1 of 1" in running.errors
    found = losses(running.output)
    assert found == {step: loss for step, loss in straight(layout).items() if step in found}
    assert max(found) == STEPS
    # the kill loses the save under way, but not the one before it
    assert re.findall(r"resumed from .*: step (\d+)|(no checkpoint in)", running.output)[-1] == ("2", "")
    left = {p.name for p in directory.iterdir()}
    assert left == {"global_step8", "global_step10", "global_step12", "latest", "ledger.jsonl"}
    run = ledger.read(directory)
    assert list(run.steps) == list(range(1, STEPS + 1))
    assert {step: run.steps[step].metrics["loss"].hex() for step in found} == found
    (killed,) = run.failures
    assert killed["died"] <= killed["time"]
    assert killed["code"] == 137
    assert re.fullmatch(r"rank \d was killed by signal 9 \(SIGKILL\) first, after \d+ s", killed["reason"])
    assert [one["step"] for one in run.of("state")] == [0, 2]
    goodput = run.goodput
    assert {"repeated steps", "restart", "restore", "compile", "save"} <= set(goodput.lost)
    assert "stopped" not in goodput.lost
    assert goodput.steps + sum(goodput.lost.values()) == pytest.approx(goodput.wall, abs=1e-3)
    assert goodput.wall > goodput.lost["restart"] > 0


@pytest.mark.parametrize("told", some(["command", "rank 1"], ["rank 1"]))
def test_sigterm_saves_at_one_step_on_all(job, tmp_path, straight, told):
    layout = "stage3 x 2"
    running = job(TRAIN, "train", layout, tmp_path / "runs", PACE="1").until(("step 3", 2))
    running.kill(running.process.pid if told == "command" else running.rank(int(told[-1])), signal.SIGTERM)
    running.ended(75, 40).gone()
    assert running.took() < 30
    (step,) = re.findall(r"SIGTERM: saved .*/global_step(\d+); exit code 75", running.output)
    assert losses(running.output, 0).keys() - losses(running.output, 1).keys() <= {int(step)}
    again = job(TRAIN, "train", layout, tmp_path / "runs").ended()
    assert f"resumed from {tmp_path}/runs/global_step{step}: step {step}" in again.output
    assert list(losses(again.output)) == list(range(int(step) + 1, STEPS + 1))
    found = losses(running.output) | losses(again.output)
    expected = straight(layout)
    assert found == {n: loss for n, loss in expected.items() if n != int(step) or n in found}


AFTER_THE_END = """
engine = runs.build(layout, resume="auto", training_data=runs.data(), checkpoint={"dir": directory})
engine.train_batch()
engine.save_checkpoint().wait()
print("trained", flush=True)
if rank == 0 or what == "stopped":
    time.sleep(1000 if rank else 8)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)
print("ended", flush=True)
"""


@pytest.mark.parametrize(("what", "code"), some([("ended", 0), ("stopped", 143)], [("ended", 0)]))
def test_sigterm_when_another_rank_takes_no_more_steps(job, tmp_path, what, code):
    """Nobody waits for a rank whose script has ended, and for a stopped one only a third of the grace."""
    running = job(AFTER_THE_END, what, "stage3 x 2", tmp_path / "runs").until(("trained", 2))
    trained = time.monotonic()
    if what == "stopped":
        running.kill(running.rank(1), signal.SIGSTOP)
    running.ended(code, 60)
    assert time.monotonic() - trained < 8 + 10 + 15  # rank 0's sleep, the wait, and a busy machine
    running.gone()
    late = "SIGTERM: stopping without a checkpoint: process 1 did not answer within 10 s"
    assert (late in running.errors) == (what == "stopped")


def test_sigterm_of_one_process_alone(start, tmp_path):
    """Without the launcher."""
    main, env = ["-u", "worker.py", "x"], QUICK | {"JAX_PLATFORMS": "cpu", "PACE": "1"}
    running = start("train", "stage3 x 2", tmp_path / "runs", main=main, env=env, program=WORKER + TRAIN)
    running.until("\nstep 3 ").kill(running.process.pid, signal.SIGTERM)
    said = running.ended(75, 30).output
    last = max(map(int, re.findall(r"^step (\d+) ", said, re.M)))
    saved = jzero.checkpoint.Checkpoint.find(tmp_path / "runs").notes["engine"]["global_steps"]
    assert saved in (last, last + 1)
    assert re.search(rf"^step {saved}: loss \d.*\njzero: SIGTERM: saved", said, re.M)  # the script did not get it


MISTAKES = """
engine = runs.build(layout)
engine.train_batch(runs.batch(0))
tried("tag", lambda: engine.save_checkpoint(directory, tag=f"tag{rank}"))
tried("directory", lambda: engine.save_checkpoint(directory + "x" * rank))
tried("nothing", lambda: engine.load_checkpoint(directory))
tried("place", lambda: engine.save_checkpoint("/proc/none"))
tried("home", lambda: runs.build(layout, resume=__file__ if rank else directory))
tried("good", lambda: engine.save_checkpoint(directory, tag="good").wait())
tried("client", lambda: engine.save_checkpoint(directory, client_state=5 if rank else None))
tried("keys", lambda: engine.save_checkpoint(directory, client_state={"best": {1: 0.5}}))
tried("tags", lambda: engine.load_checkpoint(directory, tag="good" if rank else None))
tried("resumes", lambda: runs.build(layout, resume=directory if rank else None))
for n in range(2):
    engine.save_checkpoint(directory, tag=f"here{n}", client_state={"n": n}).wait()
mine = os.path.join(directory, f"host{rank}")
shutil.copytree(os.path.join(directory, f"here{rank}"), os.path.join(mine, "a"))
work = os.getcwd()
os.chdir(mine)
tried("hosts", lambda: engine.load_checkpoint(".", tag="a"))
os.chdir(work)
tried("nested", lambda: [runs.build(layout, resume=place).global_steps for place in (f"{directory}/new", directory)])
jzero.checkpoint.async_save.TIMEOUT, jzero.distributed.host_collectives.NOTICE = 3, 1
jax.block_until_ready(engine.state)
if rank == 0:
    tried("alone", lambda: engine.save_checkpoint(directory))
time.sleep(4 * rank)
tried("again", lambda: float(engine.train_batch(runs.batch(1))) > 0)
"""
MESSAGES = {
    "tag": "tag must be the same on all processes; it is 'tag0' on rank 0, 'tag1' on rank 1",
    "directory": "directory must be the same on all processes",
    "home": "worker.py is not a writable directory; name a directory that can be written",
    "place": "CheckpointError: checkpoint /proc/none/global_step1 cannot be written",
    "nothing": "has no default checkpoint",
    "client": "ConfigError: client_state is not JSON: 5 is not a dictionary",
    "keys": "the key 1 would be read back as a string",
    "tags": 'the processes differ in tag: null on rank 0; "good" on rank 1',
    "resumes": "initialize: the processes differ in resume: null on rank 0",
    "hosts": "a differs between hosts: all hosts must share the directory",
    "alone": "timed out after 3 s waiting for process 1; all processes must make the same calls in the same order",
}


def test_mistakes_are_errors_on_all_ranks(job, tmp_path):
    done = job(MISTAKES, "x", "stage3 x 2", tmp_path / "runs").ended()
    assert "process 0 waits for process 1 (saving a checkpoint): all processes must make this call" in done.errors
    for rank, texts in enumerate(said(done)):
        for name, words in MESSAGES.items():
            assert words in texts.get(name, words if name == "alone" and rank else "")
        assert "ConfigError: " in texts["nothing"]
        assert [texts[name] for name in ("good", "nested", "again")] == [f"{tmp_path}/runs/good", "[0, 1]", "True"]


FAULTS = """
engine = runs.build(layout)
engine.train_batch(runs.batch(0))
engine.save_checkpoint(directory).wait()
before = async_save._check_shared
def broken(*args):
    raise OSError("the disk has gone")
if rank == 1:
    async_save._check_shared = broken
engine.train_batch(runs.batch(1))
under_way = engine.save_checkpoint(directory)
tried("step", lambda: float(engine.train_batch(runs.batch(2))) > 0)
tried("save", under_way.wait)
async_save._check_shared = before
tried("load", lambda: engine.load_checkpoint(directory)[0])
tried("good", lambda: engine.save_checkpoint(directory, tag="good").wait())
if rank == 1:
    reader.read_arrays = broken
tried("read", lambda: engine.load_checkpoint(directory))
tried("after", lambda: engine.train_batch(runs.batch(1)))
"""


def test_a_disk_that_fails_for_one_process(job, tmp_path):
    """A save fails on all, the checkpoint before it can be read, and training goes on; a read fails on all."""
    directory = tmp_path / "runs"
    done = job(FAULTS, "x", "stage3 x 2", directory).ended()
    for texts in said(done):
        assert (texts["step"], texts["good"]) == ("True", f"{directory}/good")
        assert texts["load"] == f"{directory}/global_step1"
        assert "global_step2 was not written: the disk has gone (process 1)" in texts["save"]
        assert "the disk has gone (process 1)" in texts["read"]
        assert "reading a checkpoint into its place failed" in texts["after"]
    assert {p.name for p in Path(directory).iterdir()} == {"global_step1", "good", "latest"}
    done.gone()
