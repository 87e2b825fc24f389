"""A soak: many steps and saves leave no descriptors, threads, memory or files behind."""

import json
import os
from pathlib import Path

import pytest
from launcher.jobs import Command

STEPS, SAVES = 1500, 150
SCRIPT = """
import json, os, sys
import numpy as np
import jzero
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
        pages = int(open("/proc/self/statm").read().split()[1])
        print("SEEN", json.dumps({
            "step": step, "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")), "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        }), flush=True)
"""


def of_process(pid):
    """A process's descriptors, threads and megabytes, as the script counts its own."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": len(os.listdir(f"/proc/{pid}/task")),
        "megabytes": megabytes,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.processes
def test_nothing_grows(tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--platform=cpu", "--num_gpus=2", "--no_local_rank", "train.py", STEPS, SAVES]
    command = Command(*words, cwd=tmp_path, env={"TMPDIR": str(temporary)})
    try:
        (agent,) = command.until(("SEEN", 20)).agents()
        watched = {"command": command.process.pid, "agent": agent}
        before, files = {name: of_process(pid) for name, pid in watched.items()}, count(tmp_path)
        command.until(("SEEN", 58), 400)
        after, later = {name: of_process(pid) for name, pid in watched.items()}, count(tmp_path)
        assert command.wait(60) == 0, command.errors
    finally:
        command.end()
    seen = {rank: [] for rank in "01"}
    for line in command.output.splitlines():
        if "SEEN" in line:
            seen[line[1]].append(json.loads(line.partition("SEEN")[2]))
    for rank, found in seen.items():
        assert [one["step"] for one in found] == list(range(STEPS // 30, STEPS + 1, STEPS // 30))
        before[f"rank {rank}"], after[f"rank {rank}"] = found[9], found[-1]
    for name in before:
        print(name, before[name], after[name])
    for name in before:
        assert after[name]["descriptors"] <= before[name]["descriptors"] + 3, name
        assert after[name]["threads"] <= before[name]["threads"] + 3, name
        assert after[name]["megabytes"] <= before[name]["megabytes"] + 30, name  # 1,000 steps and 100 saves later
    print("files", files, later)
    assert later["runs"] <= files["runs"] + 20  # a draft that is being written
    assert later["tmp"] <= files["tmp"]
    assert list(temporary.iterdir()) == []
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"latest", f"global_step{STEPS}"}
    assert len(list((tmp_path / "runs").glob("global_step*"))) == 2


def count(folder):
    return {name: sum(1 for _ in (folder / name).rglob("*")) for name in ("runs", "tmp")}
