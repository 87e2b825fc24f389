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

import numpy as np
import pytest
from helpers.sampling import some
from jobs import ROOT
from saving import STEPS, TRAIN, WORKER, losses

sys.path.append(str(ROOT / "tests"))
import layouts as runs

import jzero
from jzero import ledger

pytestmark = pytest.mark.processes


LAYOUTS = """
for name, sources in json.loads(what).items():
    engine = runs.build(runs.SHARED[name])
    for source in sources:
        engine.load_checkpoint(directory, tag=source)
        engine.save_checkpoint(directory, tag=f"{name} from {source}", save_latest=False)
        print(json.dumps([name, source, [float(engine.train_batch(runs.batch(3 + i))) for i in range(5)]]), flush=True)
jzero.checkpoint.wait()
"""


@pytest.mark.slow
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
    assert {source for _, source, _ in said} == set(names)
    for name, source, found in said:
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{source} -> {name}")
    for number, (name, source, _) in enumerate(said):  # what two processes wrote is what one had written
        back = list(engines.values())[number % len(engines)]
        back.load_checkpoint(tmp_path / "runs", tag=f"{name} from {source}")
        places = back.step_fn.state_shardings
        runs.assert_same(back.state, jzero.checkpoint.restore(tmp_path / "runs", places, tag=source))
        found = [float(back.train_batch(runs.batch(3 + step))) for step in range(5)]
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"{name} -> {back}")


KILLS = [  # the random kills below hit the others, too
    ("step 5", "stage1 x 2", "all"),
    ("writing", "stage3 x 2", "one"),
    ("committing", "pipe x 2", "all"),
    ("committing", "stage3 x 2", "one"),  # rank 0 commits, a peer dies
    ("reading", "stage2 x 2", "one"),
]


@pytest.mark.parametrize(("moment", "layout", "victims"), some(KILLS, [KILLS[1], KILLS[2]]))
def test_a_killed_job_goes_on_by_itself(job, tmp_path, straight, moment, layout, victims):
    """At a step, while arrays are written, before the rename, while one is read; `--max_restarts` starts it again."""
    slow = {"writing": "_check_shared", "committing": "commit", "reading": "_read"}
    directory = tmp_path / "runs"
    if moment == "reading":  # write a checkpoint to read
        begun = job(TRAIN, "train", layout, directory, PACE="0.3").until("step 5")
        begun.kill(begun.process.pid)
        begun.gone()
        newest = max(int(p.name[11:]) for p in directory.glob("global_step*") if p.name[11:].isdigit())
    options = ["--max_restarts", 1]
    running = job(TRAIN, "train", layout, directory, options=options, SLOW=slow.get(moment, ""), PACE="0.2")
    running.until(moment)
    (tmp_path / "started again").touch()
    for pid in [running.rank(rank) for rank in ((1,) if victims == "one" else (0, 1))]:
        with contextlib.suppress(ProcessLookupError):  # it ended with the other process
            running.kill(pid)
    running.ended().gone()
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
    run = ledger.read(directory)
    assert list(run.steps) == list(range(1, STEPS + 1))
    assert {step: run.steps[step].metrics["loss"].hex() for step in found} == found
    assert [failure["died"] <= failure["time"] for failure in run.failures] == [True]
    left = {p.name for p in directory.iterdir()}
    assert left == {"global_step8", "global_step10", "global_step12", "latest", "ledger.jsonl"}


@pytest.mark.slow
def test_a_job_killed_at_random_again_and_again(job, tmp_path, straight):
    """Any process, at any moment; the losses are the straight run's."""
    layout, directory, chance = "stage3 x 2", tmp_path / "runs", random.Random(7)
    end, kills, outputs = time.monotonic() + 45, 0, []
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
    assert kills >= 2


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


@pytest.mark.slow
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
