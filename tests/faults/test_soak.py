"""A soak: many steps and saves leave no descriptors, threads, memory or files behind."""

import json
import os
from pathlib import Path

import pytest
from launcher.jobs import Command

STEPS, SAVES = 1500, 150
SCRIPT = """
import json, sys
import numpy as np
import jzero
from faults.test_soak import held
from jzero.models.mlp import MLP, cross_entropy

steps, saves = map(int, sys.argv[1:3])
config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "seed": 3,
          "zero_optimization": {"stage": 3}, "checkpoint": {"dir": "runs", "max_to_keep": 2}}
data = np.zeros((400, 784), np.float32), np.arange(400, dtype=np.int32) % 10
engine, _, loader, _ = jzero.initialize(model=jzero.from_flax(MLP, cross_entropy), config=config, training_data=data)
for step in range(1, steps + 1):
    engine.train_batch()
    if step % (steps // saves) == 0:
        engine.save_checkpoint("runs")
    if step % (steps // 30) == 0:
        jzero.checkpoint.wait()
        print("SEEN", json.dumps(held("self")), flush=True)
"""


def held(pid):
    """A process's descriptors, threads and megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    lists = {"descriptors": f"/proc/{pid}/fd", "threads": f"/proc/{pid}/task"}
    return {name: len(os.listdir(path)) for name, path in lists.items()} | {
        "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    }


@pytest.mark.slow
@pytest.mark.processes
def test_nothing_grows(tmp_path):
    def count():
        return {name: sum(1 for _ in (tmp_path / name).rglob("*")) for name in ("runs", "tmp")}

    (temporary := tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--platform=cpu", "--num_gpus=2", "--no_local_rank", "train.py", STEPS, SAVES]
    command = Command(*words, cwd=tmp_path, env={"TMPDIR": str(temporary)})
    try:
        (agent,), _ = command.until(("SEEN", 20)).agents_and_guards()
        watched = {"command": command.process.pid, "agent": agent}
        before, files = {name: held(pid) for name, pid in watched.items()}, count()
        command.until(("SEEN", 58), 400)
        after, later = {name: held(pid) for name, pid in watched.items()}, count()
        assert command.wait(60) == 0, command.errors
    finally:
        command.end()
    lines = [line.partition("SEEN") for line in command.output.splitlines() if "SEEN" in line]
    for rank in "01":
        found = [json.loads(words) for head, _, words in lines if head[1] == rank]
        assert len(found) == 30
        before[f"rank {rank}"], after[f"rank {rank}"] = found[9], found[-1]
    for name in before:
        assert after[name]["descriptors"] <= before[name]["descriptors"] + 3, name
        assert after[name]["threads"] <= before[name]["threads"] + 3, name
        assert after[name]["megabytes"] <= before[name]["megabytes"] + 30, name  # 1,000 steps and 100 saves later
    assert later["runs"] <= files["runs"] + 20  # a draft that is being written
    assert later["tmp"] <= files["tmp"]
    assert list(temporary.iterdir()) == []
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"latest", f"global_step{STEPS}"}
    assert len(list((tmp_path / "runs").glob("global_step*"))) == 2
