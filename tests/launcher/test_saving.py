"""Checkpoints of several real processes: any layout to any other, kills at any moment, SIGTERM."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jobs import ROOT, Command, wait_for

sys.path.append(str(ROOT / "tests"))
import layouts as runs

import jzero
from jzero.distributed.exit_codes import CONFIG

pytestmark = pytest.mark.processes
STEPS = 12

WORKER = f"""
import json, os, shutil, signal, sys, time
sys.path += [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import jax, numpy as np
import jzero, layouts as runs
from jzero.checkpoint import async_save, reader

rank, (what, layout, directory) = jzero.get_rank(), sys.argv[2:5]
jax.config.update("jax_num_cpu_devices", 4 // jzero.get_world_size())
layout = runs.SHARED[layout]

def slow(module, name, words, at):
    # the at-th call prints `words` and blocks, unless the job was started again
    fast, calls = getattr(module, name), []
    def f(*args, **keywords):
        calls.append(name)
        if not os.path.exists("started again") and os.environ["SLOW"] == name and len(calls) == at:
            print(words + "\\n", end="", flush=True)  # one write, so that other ranks' lines do not split it
            time.sleep(1000)
        return fast(*args, **keywords)
    setattr(module, name, f)

def tried(name, f):
    try:
        print(f"{{name}}: {{f()}}", flush=True)
    except (jzero.ConfigError, jzero.CheckpointError) as error:
        print(f"{{name}}: {{type(error).__name__}}: {{error}}", flush=True)

def train(engine):
    while engine.global_steps < {STEPS}:
        loss = float(engine.train_batch())
        print(f"step {{engine.global_steps}} {{loss.hex()}}\\n", end="", flush=True)
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint()
        time.sleep(float(os.environ.get("PACE", 0)))
    jzero.checkpoint.wait()
"""
TRAIN = """
if "SLOW" in os.environ:
    slow(async_save, "_check_shared", "writing", 2)
    slow(async_save, "commit", "committing", 2)
    slow(reader.Checkpoint, "_read", "reading", 1)
section = {"dir": directory, "max_to_keep": 3}
engine = runs.build(layout, resume="auto", training_data=runs.data(), checkpoint=section)
train(engine)
"""


@pytest.fixture
def job(tmp_path):
    """Start a worker with a program: `job(program, ..., options=[...])`."""
    started = []

    def job(program, *arguments, options=(), processes=2, **env):
        (tmp_path / "worker.py").write_text(WORKER + program)
        command = ["--platform", "cpu", "--num_gpus", processes, *options, "worker.py", *arguments]
        started.append(Command(*command, cwd=tmp_path, env=env))
        return started[-1]

    yield job
    for command in started:
        command.end()


def losses(output, rank=0):
    """step -> loss; a step that ran twice must give the same loss."""
    found = {}
    for step, loss in re.findall(rf"^\[{rank}\] step (\d+) (\S+)$", output, re.M):
        assert found.setdefault(int(step), loss) == loss, f"step {step} gave {found[int(step)]} and {loss}"
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of an uninterrupted run, by layout."""
    made = {}

    def run(layout):
        if layout not in made:
            path = tmp_path_factory.mktemp("straight")
            (path / "worker.py").write_text(WORKER + TRAIN)
            done = Command("--platform", "cpu", "--num_gpus", 2, "worker.py", "train", layout, path / "runs", cwd=path)
            assert done.wait() == 0, done.errors
            made[layout] = losses(done.output)
            assert list(made[layout]) == list(range(1, STEPS + 1))
        return made[layout]

    return run


# ------------------------------------------------------------------------------------------- layouts


@pytest.mark.slow
def test_layouts_of_two_processes_and_of_one(job, tmp_path):
    """From each of one process's layouts to each of two processes', and what those write in one process: 50 and 50."""
    names, shared = list(runs.LAYOUTS), list(runs.SHARED)
    for name, layout in runs.LAYOUTS.items():
        engine = runs.build(layout)
        for step in range(3):
            engine.train_batch(runs.batch(step))
        engine.save_checkpoint(tmp_path / "runs", tag=name).wait()
    expected = [float(engine.train_batch(runs.batch(3 + step))) for step in range(5)]
    (tmp_path / "runs" / ".lock").unlink()  # this process holds the directory until it exits; the job takes it over
    done = job(
        """
names, shared = json.loads(what)
for name in shared:
    engine = runs.build(runs.SHARED[name])
    for source in names:
        engine.load_checkpoint(directory, tag=source)
        engine.save_checkpoint(directory, tag=f"{name} from {source}", save_latest=False)
        print(json.dumps([name, source, [float(engine.train_batch(runs.batch(3 + i))) for i in range(5)]]), flush=True)
jzero.checkpoint.wait()
""",
        json.dumps([names, shared]), "stage3 x 2", tmp_path / "runs",
    )  # fmt: skip
    assert done.wait(300) == 0, done.errors
    said = [json.loads(line[4:]) for line in done.output.splitlines() if line.startswith('[0] ["')]
    assert len(said) == len(shared) * len(names)
    for name, source, found in said:
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{source} -> {name}")
    engines = {name: runs.build(layout) for name, layout in list(runs.LAYOUTS.items())[::2]}
    for number, (name, source, _) in enumerate(said):  # what two processes wrote is what one had written
        back = list(engines.values())[number % len(engines)]
        back.load_checkpoint(tmp_path / "runs", tag=f"{name} from {source}")
        places = back.step_fn.state_shardings
        runs.assert_same(back.state, jzero.checkpoint.restore(tmp_path / "runs", places, tag=source))
        found = [float(back.train_batch(runs.batch(3 + step))) for step in range(5)]
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{name} -> {back}")


# ------------------------------------------------------------------------------------------- kills


KILLS = [
    (moment, layout, victims)
    for moment, layout in (
        ("step 5", "stage1 x 2"), ("writing", "stage3 x 2"), ("committing", "pipe x 2"), ("reading", "stage2 x 2")
    )
    for victims in ("one", "all")
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "layout", "victims"), KILLS)
def test_a_killed_job_goes_on_by_itself(job, tmp_path, straight, moment, layout, victims):
    """At a step, while arrays are written, before the rename, while one is read; `--max_restarts` starts it again."""
    slow = {"writing": "_check_shared", "committing": "commit", "reading": "_read"}
    directory = tmp_path / "runs"
    if moment == "reading":  # write a checkpoint to read
        begun = job(TRAIN, "train", layout, directory, PACE="0.3").until("step 5")
        begun.kill(begun.process.pid)
        begun.gone()
        newest = max(int(p.name[11:]) for p in directory.glob("global_step*") if p.name[11:].isdigit())
    running = job(
        TRAIN, "train", layout, directory, options=["--max_restarts", 1], SLOW=slow.get(moment, ""), PACE="0.2"
    )
    running.until(moment)
    (tmp_path / "started again").touch()
    for pid in [running.rank(rank) for rank in ((1,) if victims == "one" else (0, 1))]:
        with contextlib.suppress(ProcessLookupError):  # it ended with the other process
            running.kill(pid)
    assert running.wait() == 0, running.errors
    running.gone()
    assert "restart 1 of 1" in running.errors
    found = losses(running.output)
    assert found == {step: loss for step, loss in straight(layout).items() if step in found}
    assert max(found) == STEPS
    resumed = re.findall(r"resumed from .*: step (\d+)|(no checkpoint in)", running.output)
    # the kill loses the save under way, but not the one before it
    if moment == "step 5":  # or later on a busy machine; the save two steps earlier has ended
        last = max(losses(running.output.partition("resumed from")[0]))
        assert int(resumed[-1][0]) in range((last - 3) // 2 * 2, last + 1, 2)
    else:
        assert resumed[-1] == (str(newest if moment == "reading" else 2), "")
    left = {p.name for p in directory.iterdir()}
    assert left == {"global_step8", "global_step10", "global_step12", "latest"}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [15, 240])
def test_a_job_killed_at_random_again_and_again(job, tmp_path, straight, seconds):
    """Any process, at any moment; the losses are the straight run's."""
    layout, directory, chance = "stage3 x 2", tmp_path / "runs", random.Random(7)
    end, kills, outputs = time.monotonic() + seconds, 0, []
    while True:
        more = time.monotonic() < end
        running = job(TRAIN, "train", layout, directory, PACE="0.4" if more else "0")
        moment, killed = time.monotonic() + chance.uniform(1, 12), False
        while more and running.process.poll() is None and time.monotonic() < moment:
            time.sleep(0.02)
        if more and running.process.poll() is None and (processes := running.processes()):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                running.kill(chance.choice(sorted(processes)))
                killed = True
        code = running.wait()
        running.gone()
        kills += killed
        outputs.append(running.output)
        assert killed or code == 0, running.errors
        if "step 12" in running.output and not code:  # the run is complete
            found = losses("\n".join(outputs))
            assert found == {step: loss for step, loss in straight(layout).items() if step in found}
            outputs.clear()
            if not more:
                break
            shutil.rmtree(directory)  # start over: kills may still hit every phase
    print(f"{kills} kills")
    assert kills >= seconds // 15


# ------------------------------------------------------------------------------------------- SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("told", ["command", "rank 0", "rank 1"])
def test_sigterm_saves_at_one_step_on_all(job, tmp_path, straight, told):
    layout = "stage3 x 2"
    running = job(TRAIN, "train", layout, tmp_path / "runs", PACE="1").until(("step 3", 2))
    running.kill(running.process.pid if told == "command" else running.rank(int(told[-1])), signal.SIGTERM)
    assert running.wait(40) == 75, running.errors
    running.gone()
    assert running.took() < 30
    (step,) = re.findall(r"SIGTERM: saved .*/global_step(\d+); exit code 75", running.output)
    assert losses(running.output, 0).keys() - losses(running.output, 1).keys() <= {int(step)}
    again = job(TRAIN, "train", layout, tmp_path / "runs")
    assert again.wait() == 0, again.errors
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


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("ended", 0), ("stopped", 143)])
def test_sigterm_when_another_rank_takes_no_more_steps(job, tmp_path, what, code):
    """Nobody waits for a rank whose script has ended, and for a stopped one only a third of the grace."""
    running = job(AFTER_THE_END, what, "stage3 x 2", tmp_path / "runs").until(("trained", 2))
    trained = time.monotonic()
    if what == "stopped":
        running.kill(running.rank(1), signal.SIGSTOP)
    assert running.wait(60) == code, running.errors
    assert time.monotonic() - trained < 8 + 10 + 15  # rank 0's sleep, the wait, and a busy machine
    running.gone()
    late = "SIGTERM: stopping without a checkpoint: process 1 did not answer within 10 s"
    assert (late in running.errors) == (what == "stopped")


def test_sigterm_of_one_process_alone(tmp_path):
    """Without the launcher."""
    (tmp_path / "worker.py").write_text(WORKER + TRAIN)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "JZERO_"))} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-u", tmp_path / "worker.py", "x", "train", "stage3 x 2", tmp_path / "runs"]
    running = subprocess.Popen(command, env=env | {"PACE": "1"}, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    for line in running.stdout:
        if line.startswith("step 3"):
            running.terminate()
            break
    rest = running.stdout.read()
    assert "SIGTERM: saved" in rest
    assert running.wait(30) == 75
    last = max([3, *map(int, re.findall(r"^step (\d+) ", rest, re.M))])
    saved = jzero.checkpoint.Checkpoint.find(tmp_path / "runs").notes["engine"]["global_steps"]
    assert saved in (last, last + 1)
    assert re.search(rf"^step {saved}: loss \d.*\njzero: SIGTERM: saved", rest, re.M)  # the script did not get it


# ------------------------------------------------------------------------------------------- mistakes


def said(output):
    found = re.findall(r"^\[(\d)\] (\w+): (.*)$", output, re.M)
    return [{name: text for number, name, text in found if number == rank} for rank in "01"]


@pytest.mark.slow
def test_a_second_job_in_the_directory(job, tmp_path, straight):
    """It ends with one line about the first, which goes on; the same when that one was started again."""
    layout, directory = "stage3 x 2", tmp_path / "runs"
    waiting = TRAIN.replace("train(engine)", """
engine.train_batch()
engine.save_checkpoint().wait()
print("holds\\n", end="", flush=True)
while not os.path.exists("the others have ended"):
    time.sleep(0.1)
train(engine)
""")  # fmt: skip
    first = job(waiting, "train", layout, directory, options=["--max_restarts", 1])
    for attempt in (1, 2):
        first.until(("holds", 2 * attempt))
        owner = json.loads((directory / ".lock").read_text())["pid"]
        second = job(waiting, "train", layout, directory)
        assert second.wait() == CONFIG, second.errors
        second.gone()
        words = rf"jzero: layouts\.py:\d+: {directory} is in use by job \w+ of worker\.py \(process {owner} on"
        assert re.search(words, second.errors), second.errors
        if attempt == 1:
            first.kill(first.rank(1))
    (tmp_path / "the others have ended").touch()
    assert first.wait() == 0, first.errors
    assert "restart 1 of 1" in first.errors
    expected = straight(layout)
    assert losses(first.output) == {step: loss for step, loss in expected.items() if step > 2}
    assert {path.name for path in directory.iterdir()} == {"global_step8", "global_step10", "global_step12", "latest"}


@pytest.mark.slow
def test_mistakes_are_errors_on_all_ranks(job, tmp_path):
    theirs = tmp_path / "runs" / "theirs.saving" / "file"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    done = job(
        """
engine = runs.build(layout)
engine.train_batch(runs.batch(0))
tried("tag", lambda: engine.save_checkpoint(directory, tag=f"tag{rank}"))
tried("directory", lambda: engine.save_checkpoint(directory + "x" * rank))
tried("json", lambda: engine.save_checkpoint(directory, client_state={"x": object() if rank else 1}))
tried("place", lambda: engine.save_checkpoint("/proc/none"))
tried("nothing", lambda: engine.load_checkpoint(directory))
tried("home", lambda: runs.build(layout, resume=__file__ if rank else directory))
tried("theirs", lambda: engine.save_checkpoint(directory, tag="theirs"))
tried("good", lambda: engine.save_checkpoint(directory, tag="good").wait())
tried("client", lambda: engine.save_checkpoint(directory, client_state=5 if rank else None))
tried("keys", lambda: engine.save_checkpoint(directory, client_state={"best": {1: 0.5}}))
tried("absent", lambda: engine.load_checkpoint(directory, tag="bad"))
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
""",
        "x", "stage3 x 2", tmp_path / "runs",
    )  # fmt: skip
    assert done.wait() == 0, done.errors
    assert theirs.exists()
    assert (
        "jzero: process 0 waits for process 1 (saving a checkpoint): all processes must make this call" in done.errors
    )
    for rank, texts in enumerate(said(done.output)):
        assert "tag must be the same on all processes; it is 'tag0' on rank 0, 'tag1' on rank 1" in texts["tag"]
        assert "directory must be the same on all processes" in texts["directory"]
        assert "ConfigError: client_state is not JSON" in texts["json"]
        assert "CheckpointError: checkpoint /proc/none/global_step1 cannot be written" in texts["place"]
        assert "worker.py is not a writable directory; name one" in texts["home"]
        assert "theirs.saving exists and is not a jzero checkpoint" in texts["theirs"]
        assert "ConfigError: " in texts["nothing"]
        assert "has no default checkpoint" in texts["nothing"]
        assert texts["good"] == str(tmp_path / "runs" / "good")
        assert "ConfigError: client_state is not JSON: 5 is not a dictionary" in texts["client"]
        assert "the key 1 would be read back as a string" in texts["keys"]
        assert "ConfigError: checkpoint " in texts["absent"]
        assert "bad does not exist" in texts["absent"]
        assert 'the processes differ in tag: null on rank 0; "good" on rank 1' in texts["tags"]
        assert "initialize: the processes differ in resume: null on rank 0" in texts["resumes"]
        assert "a differs between hosts: all hosts must share the directory" in texts["hosts"]
        assert texts["nested"] == "[0, 1]"
        assert texts["again"] == "True"
        if rank == 0:
            assert (
                "timed out after 3 s waiting for process 1; all processes must make the same calls in the same order"
                in texts["alone"]
            )


@pytest.mark.slow
def test_a_file_that_one_process_cannot_read(job, tmp_path):
    done = job(
        """
engine = runs.build(layout)
engine.save_checkpoint(directory, tag="a").wait()
if rank == 1:
    def broken(*args):
        raise OSError("the disk has gone")
    reader.Checkpoint._read = broken
tried("read", lambda: engine.load_checkpoint(directory))
tried("after", lambda: engine.train_batch(runs.batch(1)))
""",
        "x", "stage3 x 2", tmp_path / "runs",
    )  # fmt: skip
    assert done.wait() == 0, done.errors
    for texts in said(done.output):
        assert "the disk has gone (process 1)" in texts["read"]
        assert "reading a checkpoint into its place failed" in texts["after"]


@pytest.mark.slow
def test_a_disk_that_is_full(job, small_disk):
    """It becomes full while Orbax writes."""
    done = job(
        """
engine = runs.build(layout)
engine.save_checkpoint(directory).wait()
large = jax.device_put(np.random.default_rng(0).normal(size=(4, 1 << 18)).astype("f4"), engine.step_fn.batch_sharding)
tried("large", lambda: jzero.checkpoint.save({"large": large}, directory, "large").wait())
tried("load", lambda: engine.load_checkpoint(directory)[0])
tried("good", lambda: engine.save_checkpoint(directory, tag="good").wait())
""",
        "x", "stage3 x 2", small_disk,
    )  # fmt: skip
    assert done.wait() == 0, done.errors
    for texts in said(done.output):
        assert "CheckpointError" in texts["large"]
        assert "No space left on device" in texts["large"]
        assert texts["load"] == str(small_disk / "global_step0")
        assert texts["good"] == str(small_disk / "good")


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process(job, tmp_path):
    """The save fails on all processes, the checkpoint before it can be read, and training goes on."""
    done = job(
        """
engine = runs.build(layout)
engine.train_batch(runs.batch(0))
engine.save_checkpoint(directory).wait()
before = async_save._check_shared
def full(*args):
    raise OSError("No space left on device")
if rank == 1:
    async_save._check_shared = full
engine.train_batch(runs.batch(1))
under_way = engine.save_checkpoint(directory)
tried("step", lambda: float(engine.train_batch(runs.batch(2))) > 0)
tried("save", under_way.wait)
async_save._check_shared = before
tried("load", lambda: engine.load_checkpoint(directory)[0])
tried("good", lambda: engine.save_checkpoint(directory, tag="good").wait())
""",
        "x", "stage3 x 2", tmp_path / "runs",
    )  # fmt: skip
    assert done.wait() == 0, done.errors
    for texts in said(done.output):
        assert texts["step"] == "True"
        assert "global_step2 was not written: No space left on device (process 1)" in texts["save"]
        assert texts["load"] == str(tmp_path / "runs" / "global_step1")
        assert texts["good"] == str(tmp_path / "runs" / "good")
    assert {p.name for p in Path(tmp_path / "runs").iterdir()} == {"global_step1", "good", "latest"}
    wait_for(lambda: not done.processes(), 10, lambda: "processes left")
