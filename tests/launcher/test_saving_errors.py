"""Mistakes and full disks in a job that saves: each is an error on all ranks, and no save is lost."""

import json
import re
from pathlib import Path

import pytest
from jobs import wait_for
from saving import TRAIN, losses

from jzero.distributed.last_words import CONFIG

pytestmark = pytest.mark.processes


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
        second.ended(CONFIG).gone()
        words = rf"jzero: layouts\.py:\d+: {directory} is in use by job \w+ of worker\.py \(process {owner} on"
        assert re.search(words, second.errors), second.errors
        if attempt == 1:
            first.kill(first.rank(1))
    (tmp_path / "the others have ended").touch()
    assert "restart 1 of 1" in first.ended().errors
    expected = straight(layout)
    assert losses(first.output) == {step: loss for step, loss in expected.items() if step > 2}
    left = {path.name for path in directory.iterdir()}
    assert left == {"global_step8", "global_step10", "global_step12", "latest", "ledger.jsonl"}


MISTAKES = """
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
"""
MESSAGES = {
    "tag": "tag must be the same on all processes; it is 'tag0' on rank 0, 'tag1' on rank 1",
    "directory": "directory must be the same on all processes",
    "json": "ConfigError: client_state is not JSON",
    "place": "CheckpointError: checkpoint /proc/none/global_step1 cannot be written",
    "home": "worker.py is not a writable directory; name a directory that can be written",
    "theirs": "theirs.saving exists and is not a jzero checkpoint",
    "nothing": "has no default checkpoint",
    "client": "ConfigError: client_state is not JSON: 5 is not a dictionary",
    "keys": "the key 1 would be read back as a string",
    "absent": "bad does not exist",
    "tags": 'the processes differ in tag: null on rank 0; "good" on rank 1',
    "resumes": "initialize: the processes differ in resume: null on rank 0",
    "hosts": "a differs between hosts: all hosts must share the directory",
    "alone": "timed out after 3 s waiting for process 1; all processes must make the same calls in the same order",
}


@pytest.mark.slow
def test_mistakes_are_errors_on_all_ranks(job, tmp_path):
    theirs = tmp_path / "runs" / "theirs.saving" / "file"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    done = job(MISTAKES, "x", "stage3 x 2", tmp_path / "runs").ended()
    assert theirs.exists()
    waits = "jzero: process 0 waits for process 1 (saving a checkpoint): all processes must make this call"
    assert waits in done.errors
    for rank, texts in enumerate(said(done.output)):
        for name, words in MESSAGES.items():
            assert words in texts.get(name, words if name == "alone" and rank else "")
        assert "ConfigError: " in texts["nothing"]
        assert "ConfigError: checkpoint " in texts["absent"]
        assert texts["good"] == str(tmp_path / "runs" / "good")
        assert texts["nested"] == "[0, 1]"
        assert texts["again"] == "True"


GONE = """
engine = runs.build(layout)
engine.save_checkpoint(directory, tag="a").wait()
if rank == 1:
    def broken(*args):
        raise OSError("the disk has gone")
    reader.read_arrays = broken
tried("read", lambda: engine.load_checkpoint(directory))
tried("after", lambda: engine.train_batch(runs.batch(1)))
"""
FULL = """
engine = runs.build(layout)
engine.save_checkpoint(directory).wait()
large = jax.device_put(np.random.default_rng(0).normal(size=(4, 1 << 18)).astype("f4"), engine.step_fn.batch_sharding)
tried("large", lambda: jzero.checkpoint.save({"large": large}, directory, "large").wait())
tried("load", lambda: engine.load_checkpoint(directory)[0])
tried("good", lambda: engine.save_checkpoint(directory, tag="good").wait())
"""
FULL_FOR_ONE = """
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
"""


@pytest.mark.slow
def test_a_file_that_one_process_cannot_read(job, tmp_path):
    done = job(GONE, "x", "stage3 x 2", tmp_path / "runs").ended()
    for texts in said(done.output):
        assert "the disk has gone (process 1)" in texts["read"]
        assert "reading a checkpoint into its place failed" in texts["after"]


@pytest.mark.slow
def test_a_disk_that_is_full(job, small_disk):
    """It becomes full while Orbax writes."""
    done = job(FULL, "x", "stage3 x 2", small_disk).ended()
    for texts in said(done.output):
        assert "CheckpointError" in texts["large"]
        assert "No space left on device" in texts["large"]
        assert texts["load"] == str(small_disk / "global_step0")
        assert texts["good"] == str(small_disk / "good")


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process(job, tmp_path):
    """The save fails on all processes, the checkpoint before it can be read, and training goes on."""
    done = job(FULL_FOR_ONE, "x", "stage3 x 2", tmp_path / "runs").ended()
    for texts in said(done.output):
        assert texts["step"] == "True"
        assert "global_step2 was not written: No space left on device (process 1)" in texts["save"]
        assert texts["load"] == str(tmp_path / "runs" / "global_step1")
        assert texts["good"] == str(tmp_path / "runs" / "good")
    assert {p.name for p in Path(tmp_path / "runs").iterdir()} == {"global_step1", "good", "latest"}
    wait_for(lambda: not done.processes(), 10, lambda: "processes left")
